"""Models of Hugging Face transformers compute with attn_implementation="tilewise" what they compute without it."""

from __future__ import annotations

import copy
import os
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tilewise import testing
from tilewise.adapters import transformers as adapter
from tilewise.adapters.transformers import DenseMaskWarning, attention_forward, register

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'tilewise[transformers]'")

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Inputs = dict[str, torch.Tensor]

EPS = torch.finfo(torch.float32).eps
SIZES: dict[str, object] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "initializer_range": 0.2,  # scores large enough that caps, sinks and windows matter
}
DECODER = SIZES | {"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": None}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
WINDOWED = DECODER | {"head_dim": 8, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
# The class of each model, of its configuration, and what is configured.
MODELS: dict[str, tuple[str, str, dict[str, object]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", DECODER),
    "mistral": ("MistralForCausalLM", "MistralConfig", DECODER | {"sliding_window": 7}),
    # Its masks have a window of which its layers say nothing.
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        DECODER | EXPERTS | {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "llama4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        DECODER
        | {"attention_chunk_size": 8, "num_local_experts": 2, "intermediate_size_mlp": 32, "head_dim": 8}
        | {"no_rope_layers": [1, 0]},
    ),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", DECODER | {"head_dim": 8}),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        WINDOWED | {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
    ),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", WINDOWED | {"query_pre_attn_scalar": 8}),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        WINDOWED
        | {"num_local_experts": 4, "num_experts_per_tok": 2}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "bert": ("BertForMaskedLM", "BertConfig", SIZES),
    "vit": ("ViTForImageClassification", "ViTConfig", SIZES | {"image_size": 16, "patch_size": 4, "num_labels": 97}),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
        | {"relative_attention_num_buckets": 8, "pad_token_id": 0, "eos_token_id": None, "decoder_start_token_id": 1},
    ),
}
SPARSE = ("qwen2_moe", "gpt_oss")


@pytest.fixture(autouse=True)
def _registered() -> None:
    register()


def build(name: str, **options: object) -> PreTrainedModel:
    """Make a small model with random weights."""
    kind, config, sizes = MODELS[name]
    torch.manual_seed(0)
    model: PreTrainedModel = getattr(transformers, kind)(getattr(transformers, config)(**(sizes | options)))
    if name in SPARSE:
        model.set_experts_implementation("eager")  # torch's grouped product has no float64
    model.train(False)
    return model


def batch(side: str, lengths: tuple[int, ...] = (20, 13, 6)) -> Inputs:
    """Make token ids padded on a side, and their mask."""
    longest = max(lengths)
    ids = torch.randint(3, 97, (len(lengths), longest), generator=torch.Generator().manual_seed(1))
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        start = {"left": longest - length, "right": 0, "both": (longest - length) // 2}[side]
        mask[row, start : start + length] = 1
    return {"input_ids": ids * mask, "attention_mask": mask}


def inputs_for(name: str, side: str) -> Inputs:
    """Make what a model of a kind takes."""
    if name == "vit":
        return {"pixel_values": torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))}
    if name == "t5":
        return batch(side) | {"decoder_input_ids": batch(side, (9, 9, 9))["input_ids"]}
    return batch(side)


def outputs(model: PreTrainedModel, implementation: str, inputs: Inputs) -> list[torch.Tensor]:
    """Give the logits of all tokens that are no padding, and the gradient of every parameter, in one vector."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    logits: torch.Tensor = model(**inputs).logits
    if "attention_mask" in inputs and "decoder_input_ids" not in inputs:
        logits = logits[inputs["attention_mask"].bool()]
    torch.autograd.backward(logits.square().mean())
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in model.parameters()]
    return [logits.detach(), torch.cat([x.flatten() for x in grads])]


def exact_outputs(model: PreTrainedModel, inputs: Inputs) -> list[torch.Tensor]:
    """Give the same in float64, in which transformers' eager attention takes its softmax too."""
    wide = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "softmax", lambda x, dim, dtype=None: torch.softmax(x, dim))  # noqa: ARG005
        return outputs(copy.deepcopy(model).double(), "eager", wide)


def judge(model: PreTrainedModel, inputs: Inputs, implementation: str = "tilewise") -> list[testing.Error]:
    """Measure logits and gradients against the model in float64, beside what its own eager attention loses."""
    exact = exact_outputs(model, inputs)
    low, got = (outputs(model, each, inputs) for each in ("eager", implementation))
    return [testing.error(*each, EPS) for each in zip(got, exact, low, strict=True)]


@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("llama4", "vit")])
def test_logits_and_gradients_are_as_exact_as_those_of_eager_attention(name: str, side: str) -> None:
    for error in judge(build(name), inputs_for(name, side)):
        assert error.within, error


def test_images_come_out_as_exact_as_with_eager_attention() -> None:
    for error in judge(build("vit"), inputs_for("vit", "")):
        assert error.within, error


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "bert"])
def test_a_batch_without_a_mask_is_served_alike(name: str) -> None:
    for error in judge(build(name), {"input_ids": batch("left", (20, 20))["input_ids"]}):
        assert error.within, error


@pytest.mark.parametrize(
    ("name", "side"), [("llama", "left"), ("mistral", "both"), ("gpt_oss", "left"), ("t5", "right"), ("bert", "right")]
)
def test_padding_that_the_host_may_not_read_is_hidden_alike(
    name: str, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "_is_readable", lambda _: False)  # as on a device
    for error in judge(build(name), inputs_for(name, side)):
        assert error.within, error


def test_chunks_are_no_band_and_still_come_out_right() -> None:
    with pytest.warns(DenseMaskWarning, match="no band"):
        errors = judge(build("llama4"), batch("left"))
    for error in errors:
        assert error.within, error


def test_padding_that_no_mask_function_hides_would_be_noticed() -> None:
    transformers.AttentionInterface.register("tilewise_unmasked", attention_forward)
    errors = judge(build("bert"), batch("right"), "tilewise_unmasked")
    assert not any(error.within for error in errors), errors


GENERATING = ("llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss", "t5")
CACHES: list[tuple[str, str | None, bool]] = [(name, None, True) for name in GENERATING]
CACHES += [(name, "static", True) for name in ("llama", "mistral", "gemma3", "gpt_oss")]
CACHES += [(name, "static", False) for name in ("llama", "mistral")]  # as on a device


@pytest.mark.parametrize(("name", "argument"), [("gemma2", "softcap"), ("gpt_oss", "s_aux"), ("t5", "position_bias")])
def test_an_argument_that_were_lost_would_be_noticed(name: str, argument: str) -> None:
    asked = []

    def forgetful(*arguments: object, **options: object) -> object:
        asked.append(argument)
        return attention_forward(*arguments, **(options | {argument: None}))  # type: ignore[arg-type]

    transformers.AttentionInterface.register("tilewise_forgetful", forgetful)
    transformers.AttentionMaskInterface.register("tilewise_forgetful", adapter.key_ranges)
    errors = judge(build(name), inputs_for(name, "left"), "tilewise_forgetful")
    if not asked:
        pytest.skip(f"in this release of transformers, {name} computes its attention by itself")
    assert not any(error.within for error in errors), errors


@pytest.mark.parametrize(("name", "cache", "readable"), CACHES)
@pytest.mark.filterwarnings("ignore::tilewise.adapters.transformers.DenseMaskWarning")
def test_greedy_generation_gives_the_same_tokens(
    name: str, cache: str | None, readable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not readable:
        monkeypatch.setattr(adapter, "_is_readable", lambda _: False)
    model, inputs = build(name), batch("left")
    found = []
    for implementation in ("eager", "tilewise"):
        model.set_attn_implementation(implementation)
        options = {"max_new_tokens": 16, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
        found.append(model.generate(**inputs, **options))  # type: ignore[operator]  # a method, whatever its base says
    assert found[0].shape == (3, (1 if name == "t5" else 20) + 16)
    assert torch.equal(*found)


@pytest.mark.parametrize("bounds_given", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_documents_packed_into_one_row_do_not_see_each_other(name: str, bounds_given: bool) -> None:
    lengths = [7, 12, 1]
    ids = batch("left", (20,))["input_ids"]
    positions = torch.cat([torch.arange(length) for length in lengths])
    model, packed = build(name, use_cache=False), {"input_ids": ids, "position_ids": positions[None]}
    if bounds_given:  # as transformers' own collator gives them
        bounds = torch.tensor([0, 7, 19, 20], dtype=torch.int32)
        packed |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
        packed |= {"max_length_q": torch.tensor(12), "max_length_k": torch.tensor(12)}
    for error in judge(model, packed):
        assert error.within, error
    alone = [outputs(model, "tilewise", {"input_ids": part})[0] for part in ids.split(lengths, 1)]
    exact, low = exact_outputs(model, packed)[0], outputs(model, "eager", packed)[0]
    assert testing.error(torch.cat(alone, 1), exact, low, EPS).within


class Watch(TorchDispatchMode):
    """Remember the largest tensor that any operator returns."""

    largest = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        results = func(*args, **(kwargs or {}))
        for x in results if isinstance(results, tuple) else (results,):
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.numel())
        return results


@pytest.mark.parametrize(
    ("name", "rows"),
    [("llama", "padded"), ("mistral", "padded"), ("bert", "padded"), ("llama", "packed"), ("mistral", "packed")],
)
def test_nothing_as_large_as_the_score_matrix_is_built(name: str, rows: str) -> None:
    length = 2048
    heads = {"num_attention_heads": 2} | ({} if name == "bert" else {"num_key_value_heads": 1, "use_cache": False})
    model = build(name, num_hidden_layers=1, **heads)
    inputs = batch("right", (length, length - 100))
    if rows == "packed":
        inputs = {"input_ids": inputs["input_ids"][:1], "position_ids": torch.arange(length)[None] % 1000}
    largest = {}
    for implementation in ("tilewise", "sdpa"):
        model.set_attn_implementation(implementation)
        with Watch() as watch:  # type: ignore[no-untyped-call]  # as torch leaves it
            model(**inputs).logits.sum().backward()
        largest[implementation] = watch.largest
    assert largest["tilewise"] < length * length <= largest["sdpa"]


def test_a_model_compiles_into_one_graph_that_serves_other_lengths() -> None:
    model = build("mistral", num_hidden_layers=1)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for lengths in ((12, 9), (31, 30)):
        inputs = batch("left", lengths)
        exact = exact_outputs(model, inputs)[0]
        low = outputs(model, "eager", inputs)[0]
        model.set_attn_implementation("tilewise")
        with torch.no_grad():
            got = compiled(**inputs, use_cache=False).logits[inputs["attention_mask"].bool()]
        assert testing.error(got, exact, low, EPS).within


def test_a_model_asked_for_probabilities_refuses() -> None:
    model = build("llama")
    model.set_attn_implementation("tilewise")
    with pytest.raises(ValueError, match="output_attentions=True"):
        model(**batch("left"), output_attentions=True)


def test_a_long_document_is_read_alike_and_measured(capsys: pytest.CaptureFixture[str]) -> None:
    example = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "long_document.py"))
    assert example["main"](["--length", "300", "--device", "cpu", "--rounds", "1"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("300 tokens, torch.float32, on ")
    assert re.search(r"^tilewise +\d+\.\d+ s \(median of 1\), peak \d+ MiB beyond the model$", printed, re.MULTILINE)
    assert "They agree within budget." in printed


def test_the_code_of_the_page_on_switching_runs(tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "switch" / "transformers.md").read_text(encoding="utf-8")
    script = tmp_path / "page.py"
    script.write_text("\n".join(re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)), encoding="utf-8")
    assert runpy.run_path(str(script))["tokens"].shape == (2, 15)
