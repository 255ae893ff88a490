"""Checks whether another program can compute a model of the built-in decoder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.config.model import ModelSection
from weft.config.section import Section
from weft.errors import UserError

# What each layout requires: key of `model:` (or property of `ModelSection`) -> supported values.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "norm_placement": ("pre",), "use_parallel_residual": (False,), "clip_qkv": (None,), "attention_sinks": (False,),
    "mla": (None,), "attention_pattern": (None,), "embedding_multiplier": (1.0,), "residual_multiplier": (1.0,),
    "logits_scaling": (1.0,), "attn_logit_softcapping": (None,), "logit_softcap": (None,), "num_labels": (None,),
}  # fmt: skip


@dataclass(frozen=True)
class Requirements:
    """The models that another program can compute.

    Attributes:
        program: name of the program, for messages.
        values: key of `model:` -> supported values, in addition to `_PLAIN`.
        experts: key of `model.moe:` -> supported values.
    """

    program: str
    values: Mapping[str, tuple[Any, ...]]
    experts: Mapping[str, tuple[Any, ...]]

    def check(self, section: ModelSection, **names: str) -> None:
        """Raises UserError if the program cannot compute a model. The message names the key, its value and remedies.

        Args:
            names: values for the placeholders in `program`.
        """
        for key, values in {**_PLAIN, **self.values}.items():
            self.check_value(key, getattr(section, key), values, **names)
        layers, default = range(section.num_hidden_layers), section.qk_head_dim**-0.5
        slides = any(section.slides(layer) for layer in layers)
        self.check_value("sliding_window", section.sliding_window if slides else None, (None,), **names)
        multiplier = section.attention_multiplier or default
        if not math.isclose(multiplier, default, rel_tol=1e-6):
            self.check_value("attention_multiplier", multiplier, (default,), **names)
        if section.position == "rope":
            rotates = [int(section.rotates(layer)) for layer in layers]
            self.check_value("no_rope_layers", rotates, ([1] * len(layers),), **names)
        if section.moe is not None:
            dense = [layer for layer in layers if not section.has_experts(layer)]
            self.check_value("moe.mlp_only_layers", dense, ([],), **names)
            for key, values in self.experts.items():
                self.check_value(f"moe.{key}", getattr(section.moe, key), values, **names)

    def check_value(self, key: str, value: Any, supported: tuple[Any, ...], **names: str) -> None:
        """Raises UserError if `value` is not in `supported`."""
        if value not in supported:
            allowed = " or ".join("none" if one is None else repr(one) for one in supported)
            given = "set" if isinstance(value, Section) else repr(value)
            raise UserError(
                f"model.{key} is {given}, which {self.program.format(**names)} does not support (supported: "
                f"{allowed}); use --to hf, which holds every family"
            )
