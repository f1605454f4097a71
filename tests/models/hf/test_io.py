"""Directories in both directions: bit-exact, whole or absent, and every bad input refused by name before any work."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import judge
import pytest
import torch
from grid import GRID, Case
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from surefoot.core.errors import EngineError, InputError, ModelError
from surefoot.models import ModelSpec, Transformer, initialise
from surefoot.models.hf import FAMILIES, export_directory, export_model, import_directory, import_model, load_model_dir, save_model
from surefoot.models.hf.meaning import meaning
from surefoot.models.spec import AttentionSpec, FeedForwardSpec, InitSpec, MoESpec

ONE_OF_EACH = [next(case for case in GRID if case.family == family) for family in FAMILIES]
# What a config may say that means nothing to the function from tokens to logits, or says it in other words.
MUTE = {
    "transformers_version", "_name_or_path", "architectures", "initializer_range", "max_window_layers", "block_auto_adjust_ff_dim",
    "num_nextn_predict_layers", "rms_norm_eps", "head_dim", "layer_types", "mlp_only_layers",
}  # fmt: skip
SPEC = ModelSpec(
    vocab_size=40, dim=12, layers=2, attention=AttentionSpec(heads=2, kv_heads=1, head_dim=6), ffn=FeedForwardSpec(hidden=10)
)  # fmt: skip


def tensors(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def identical(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    def same(a: Tensor, b: Tensor) -> bool:
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))

    return first.keys() == second.keys() and all(same(first[name], second[name]) for name in first)


def theirs(case: Case, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    model = judge.make_judge(case, torch.float32).to(dtype)
    judge.save(model, folder)
    return model


def tokenizer(size: int = 40) -> Tokenizer:
    return Tokenizer(models.WordLevel({f"w{index}": index for index in range(size)}, unk_token="w0"))


def small(seed: int = 0) -> Transformer:
    model = Transformer(SPEC)
    initialise(model, seed)
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("case", ONE_OF_EACH, ids=lambda case: case.family)
def test_their_directory_survives_the_round_trip_bit_for_bit(case: Case, dtype: torch.dtype, tmp_path: Path) -> None:
    theirs(case, tmp_path / "hf", dtype)
    import_directory(tmp_path / "hf", tmp_path / "mine")
    export_directory(tmp_path / "mine", tmp_path / "back", family=case.family)
    before, after = tensors(tmp_path / "hf"), tensors(tmp_path / "back")
    wide = {name for name in after if "correction_bias" in name}  # the selection bias is always written in float32
    assert identical(before, {name: t.to(before[name].dtype) if name in wide else t for name, t in after.items()})
    first, second = (AutoConfig.from_pretrained(tmp_path / name).to_dict() for name in ("hf", "back"))
    read = first.keys() - MUTE - ({"intermediate_size"} if case.family == "qwen3_moe" else set())  # no dense layer there
    assert {key: first[key] for key in read} == {key: second.get(key) for key in read}
    reloaded = FAMILIES[case.family].spec(json.loads((tmp_path / "back" / "config.json").read_text()))
    assert reloaded == FAMILIES[case.family].spec(json.loads((tmp_path / "hf" / "config.json").read_text()))


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=lambda case: case.family)
def test_transformers_loads_the_export_and_says_the_same(case: Case, tmp_path: Path) -> None:
    original = theirs(case, tmp_path / "hf")
    spec, model = import_model(tmp_path / "hf")
    export_model(spec, model, tmp_path / "out", max_shard_bytes=4000, family=case.family)
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager", experts_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    tokens = judge.make_batch(case).tokens
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens).logits, original(tokens).logits)


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=lambda case: case.family)
def test_our_model_survives_the_round_trip_bit_for_bit(case: Case, tmp_path: Path) -> None:
    theirs(case, tmp_path / "hf")
    spec, model = import_model(tmp_path / "hf")
    training: dict[str, Any] = {"init": InitSpec(scheme="fixed", std=0.03)}
    if spec.moe is not None:
        training["moe"] = spec.moe.model_copy(update={"balance": "aux_loss", "aux_coefficient": 0.3, "z_coefficient": 0.01})
    spec = spec.model_copy(update=training)
    export_model(spec, model, tmp_path / "out", family=case.family)
    again, back = import_model(tmp_path / "out")
    assert again == meaning(spec)
    assert identical(model.state_dict(), back.state_dict())


def test_model_directory_round_trip(tmp_path: Path) -> None:
    model = small()
    save_model(tmp_path / "m", SPEC, model, tokenizer(), max_shard_bytes=1000, generation={"eos_token_id": 3})
    spec, back = load_model_dir(tmp_path / "m")
    assert spec == SPEC and identical(model.state_dict(), back.state_dict())
    assert json.loads((tmp_path / "m" / "generation_config.json").read_text()) == {"eos_token_id": 3}


def test_moe_born_here_reaches_transformers(tmp_path: Path) -> None:
    moe = MoESpec(experts=4, top_k=2, hidden=8, balance="aux_loss", aux_coefficient=0.02)
    spec = SPEC.model_copy(update={"moe": moe, "ffn": None, "ffn_pattern": ("moe",), "tied_embeddings": True})
    model = Transformer(spec)
    initialise(model, 0)
    export_model(spec, model, tmp_path / "out")
    tokens = torch.arange(10)[None]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    with torch.no_grad():
        assert torch.allclose(loaded(tokens).logits, model(tokens), atol=1e-5)
    assert import_model(tmp_path / "out")[0] == meaning(spec)


def test_tokenizer_generation_and_chat_template_travel(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    generation = {"bos_token_id": 1, "eos_token_id": [2, 5], "pad_token_id": 0, "temperature": 0.7, "do_sample": True}
    export_model(SPEC, small(), tmp_path / "a", tokenizer=tokenizer(), generation=generation, chat_template=template)
    import_directory(tmp_path / "a", tmp_path / "b")
    export_directory(tmp_path / "b", tmp_path / "c")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "c")
    assert loaded.chat_template == template and loaded.bos_token == "w1" and loaded.pad_token == "w0" and len(loaded) == 40
    assert json.loads((tmp_path / "c" / "generation_config.json").read_text()) == generation
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "c")
    assert model.generation_config.eos_token_id == [2, 5] and model.config.bos_token_id == 1


def test_token_ids_that_only_the_config_has_are_kept(tmp_path: Path) -> None:
    export_model(SPEC, small(), tmp_path / "a")
    edit_config(tmp_path / "a", eos_token_id=7)
    import_directory(tmp_path / "a", tmp_path / "b")
    export_directory(tmp_path / "b", tmp_path / "c")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "c").generation_config.eos_token_id == 7


def test_no_token_stops_a_model_that_names_none(tmp_path: Path) -> None:
    """A key left out would become the family's default (Llama: token 2 ends a text)."""
    export_model(SPEC, small(), tmp_path / "a")
    config = AutoConfig.from_pretrained(tmp_path / "a")
    assert config.eos_token_id is None and config.bos_token_id is None and config.pad_token_id is None


def test_export_casts_but_keeps_the_selection_bias_wide(tmp_path: Path) -> None:
    case = Case("deepseek_v3", "base")
    theirs(case, tmp_path / "hf")
    spec, model = import_model(tmp_path / "hf")
    export_model(spec, model, tmp_path / "out", dtype=torch.bfloat16)
    dtypes = {name: t.dtype for name, t in tensors(tmp_path / "out").items()}
    assert {dtype for name, dtype in dtypes.items() if "correction" not in name} == {torch.bfloat16}
    assert {dtype for name, dtype in dtypes.items() if "correction" in name} == {torch.float32}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    back = import_model(tmp_path / "out")[1]
    assert back.moe_layers()[0].router_bias is not None
    assert torch.equal(back.moe_layers()[0].router_bias, model.moe_layers()[0].router_bias)  # type: ignore[arg-type]


def test_tensors_of_later_prediction_modules_are_left_out(tmp_path: Path) -> None:
    theirs(Case("deepseek_v3", "base"), tmp_path)
    edit_weights(tmp_path, lambda t: t.update({"model.layers.3.eh_proj.weight": torch.zeros(2)}))
    edit_config(tmp_path, num_nextn_predict_layers=1)
    assert import_model(tmp_path)[0].layers == 3
    edit_config(tmp_path, num_nextn_predict_layers=0)
    with pytest.raises(ModelError, match=r"unexpected .*model\.layers\.3\.eh_proj"):
        import_model(tmp_path)


def test_tied_model_with_a_stored_head(tmp_path: Path) -> None:
    theirs(Case("lfm2", "base"), tmp_path)
    edit_weights(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    import_model(tmp_path)
    edit_weights(tmp_path, lambda t: t["lm_head.weight"].add_(1.0))
    with pytest.raises(ModelError, match="another matrix"):
        import_model(tmp_path)


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    loaded = load_file(folder / "model.safetensors")
    change(loaded)
    save_file(loaded, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])


NORM, QUERY = "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"
BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda f: edit_weights(f, lambda t: t.pop(NORM)), r"1 tensor\(s\) missing, first 'model\.norm\.weight'"),
    "renamed": (lambda f: edit_weights(f, lambda t: t.update({"model.nrom.weight": t.pop(NORM)})), "did you mean 'model.nrom.weight'"),
    "extra": (lambda f: edit_weights(f, lambda t: t.update({"extra.weight": torch.zeros(1)})), r"unexpected tensor\(s\), first 'extra"),
    "shape": (lambda f: edit_weights(f, lambda t: t.update({QUERY: torch.zeros(12, 11)})), r"q_proj\.weight' is \[12, 11\]"),
    "dtype": (lambda f: edit_weights(f, lambda t: t.update({NORM: torch.zeros(12, dtype=torch.int8)})), "is I8"),
    "cut": (cut, "not a whole safetensors file"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no weights"),
    "no config": (lambda f: (f / "config.json").unlink(), "no such file"),
    "broken config": (lambda f: (f / "config.json").write_text("{"), "not valid JSON"),
    "family": (lambda f: edit_config(f, model_type="qwen3moe"), "did you mean 'qwen3_moe'"),
    "rope": (lambda f: edit_config(f, rope_parameters={"rope_type": "longrope", "factor": 2.0}), "rope type 'longrope' is not supported"),
    "rope key": (lambda f: edit_config(f, rope_parameters={"rope_type": "linear", "factr": 2.0}), "did you mean 'factor'"),
    "partial": (lambda f: edit_config(f, partial_rotary_factor=0.5), "whole heads"),
    "dropout": (lambda f: edit_config(f, attention_dropout=0.1), "no dropout"),
    "quantised": (lambda f: edit_config(f, quantization_config={"bits": 4}), "quantised"),
    "activation": (lambda f: edit_config(f, hidden_act="relu2"), "activation 'relu2' is not supported"),
    "type": (lambda f: edit_config(f, hidden_size="12"), "must be a whole number"),
    "heads": (lambda f: edit_config(f, num_key_value_heads=3), "does not divide heads"),
    "no key": (lambda f: edit_config(f, vocab_size=None), "must be a whole number"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_bad_directory_is_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    export_model(SPEC, small(), tmp_path / "m")
    spoil, message = BAD[kind]
    spoil(tmp_path / "m")
    with pytest.raises(InputError, match=message) as caught:
        import_model(tmp_path / "m")
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    export_model(SPEC, small(), tmp_path / "m", max_shard_bytes=2000)
    next((tmp_path / "m").glob("model-00002*")).unlink()
    with pytest.raises(ModelError, match="model-00002"):
        import_model(tmp_path / "m")


def test_bad_state_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    state = small().state_dict()
    state.pop("norm.weight")
    for write in (save_model, lambda out, spec, model: export_model(spec, model, out)):
        with pytest.raises(ModelError, match=r"first 'norm\.weight'"):
            write(tmp_path / "m", SPEC, state)
    with pytest.raises(ModelError, match="has 41 tokens, the model 40"):
        export_model(SPEC, small(), tmp_path / "m", tokenizer=tokenizer(41))
    assert not list(tmp_path.iterdir())


def test_a_failure_while_writing_leaves_the_previous_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_model(SPEC, small(), tmp_path / "m")
    before = tensors(tmp_path / "m")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("surefoot.models.hf.weights.save_file", full)
    with pytest.raises(EngineError, match="disk is full"):
        export_model(SPEC, small(1), tmp_path / "m", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["m"] and identical(before, tensors(tmp_path / "m"))


def test_an_occupied_directory_is_kept_unless_told_otherwise(tmp_path: Path) -> None:
    export_model(SPEC, small(), tmp_path / "m")
    with pytest.raises(ModelError, match="is not empty"):
        export_model(SPEC, small(1), tmp_path / "m")
    export_model(SPEC, small(1), tmp_path / "m", overwrite=True)
    assert identical(import_model(tmp_path / "m")[1].state_dict(), small(1).state_dict())
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
