"""Finds keys of the section `adapter` that contradict each other or other sections."""

from __future__ import annotations

from weft.config.adapter import AdapterSection, adapted_layers, decoder_layers, is_stacked, unquantizable
from weft.config.draft import Draft
from weft.config.model_rules import known_model
from weft.config.section import partial_section
from weft.errors import UserError


def check_adapter_section(draft: Draft) -> None:
    """Reports the problems of the section `adapter`, without building a model."""
    if draft.get("adapter.r") is None:
        return
    kind, weights = draft.get("model.type"), draft.get("model.weights")
    from_folder = kind == "hf" and weights is not False and draft.get("model.path") is not None
    if isinstance(draft.get("model"), dict):  # a custom model
        has_source = draft.node("model").get("from") is not None
    else:
        has_source = draft.get("model.from") is not None or from_folder
    if not has_source and not any(problem.key.startswith("model") for problem in draft.problems):
        what = "an adapter needs a trained model; set model.from to a run, a checkpoint or a Hugging Face folder"
        draft.report("adapter", what)
    others = {
        "training.only_rows_from": "the adapter freezes all rows",
        "training.freeze": "the adapter freezes all other parameters",
        "training.fp8": "adapters do not support fp8",
        "training.qat.type": "adapters do not support quantization-aware training",
        "model.load_optimizer": "the saved optimizer state is for all parameters, but the adapter freezes them",
    }
    for key, why in others.items():
        if draft.get(key):
            draft.report(key.removesuffix(".type"), f"{why}; remove this key, or the section adapter", "adapter")
    if draft.get("model.num_nextn_predict_layers"):
        what = "an adapter does not train multi-token prediction layers; set 0"
        draft.report("model.num_nextn_predict_layers", what, "adapter")
    if draft.get("adapter.init") == "pissa":
        for key in ("quantize", "dora"):
            if draft.get(f"adapter.{key}"):
                what = f"pissa changes the frozen weights, which {key} does not support; set init: default"
                draft.report("adapter.init", what, f"adapter.{key}")
    _check_targets(draft)


def _check_targets(draft: Draft) -> None:
    targets = draft.get("adapter.targets")
    if targets == []:
        draft.report("adapter.targets", "the list is empty; name at least one layer, or set auto")
    elif targets is not None and draft.get("model.type") == "decoder" and draft.get("model.hidden_size") is not None:
        model = known_model(draft.get)
        if model.num_hidden_layers is None or model.num_attention_heads is None:
            return
        layers = decoder_layers(model)
        quantized = layers.items() if draft.get("adapter.quantize") else ()
        if wrong := next(filter(None, (unquantizable(name, shape.inputs) for name, shape in quantized)), None):
            draft.report("adapter.quantize", wrong)
        section = partial_section(AdapterSection, draft.get, "adapter", from_=None)
        try:
            adapted_layers(section, layers, [name for name in layers if is_stacked(name)])
        except UserError as error:
            key, _, what = error.what.partition(": ")
            draft.report(key, what, "adapter.targets")
