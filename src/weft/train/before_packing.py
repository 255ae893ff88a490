"""Finds mistakes of a run with raw data before the data are packed, which can take hours."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import nn

from weft.checkpoint.adapter_record import saved_record
from weft.checkpoint.adapter_start import open_start
from weft.checkpoint.base_model import base_path, check_base, check_digest
from weft.checkpoint.load import checkpoints, resolve
from weft.config.adapter import AdapterSection
from weft.config.components import make_component
from weft.config.model import CustomModelSection
from weft.config.run import RunConfig
from weft.errors import UserError
from weft.models.adapter import add_adapter
from weft.models.build import build_model
from weft.models.parameter_patterns import last_match, raise_if_unmatched
from weft.parallel.gradients.frozen_rows import freeze_all_but_rows
from weft.train.frozen_sources import check_sources


def check_before_packing(config: RunConfig, *, fresh: bool = False) -> None:
    """Checks adapter, patterns of parameter names and frozen models of a run with raw data. Loads no weights.

    Does nothing if the run has no raw data, because then the run itself finds these mistakes at once. The parameters of
    a custom model are not known before the model is built, so their names are not checked.

    Args:
        fresh: whether the run starts over although its run directory has checkpoints.

    Raises:
        UserError: an adapter does not fit the model, was trained on other weights or has other settings than the run
            that is resumed; a pattern matches no trained parameter; or a frozen model of the objective does not exist,
            or has another vocabulary than the run.
    """
    if not config.data.raw or config.generates:
        return
    try:
        check_sources(config, make_component(config.objective, "objective"))
        if config.adapter is not None:
            _check_adapter_source(config, config.adapter, resumes=not fresh and bool(checkpoints(config.run_directory)))
        if not isinstance(config.model, CustomModelSection) and (config.adapter is not None or patterns(config)):
            with torch.device("meta"):
                model = build_model(config.model)
            check_patterns(config, _trained_parameters(model, config))
    except UserError as error:
        error.quiet = os.environ.get("LOCAL_RANK", "0") != "0"  # all ranks raise the same error
        raise


def _check_adapter_source(config: RunConfig, adapter: AdapterSection, *, resumes: bool) -> None:
    base = base_path(config.model)
    check_base(base)
    if resumes:
        record = saved_record(resolve(config.run_directory), adapter)
    else:
        start = open_start(adapter, config.model)
        record = None if start is None else start.record(adapter)
    if record is not None:
        check_digest(config.model, base, record.base)


def _trained_parameters(model: nn.Module, config: RunConfig) -> dict[str, bool]:
    """Returns parameter name -> whether the run trains it. Adds the run's adapter to the model.

    Raises:
        UserError: `adapter.targets` has a name that matches no layer, or the adapter does not support a layer.
    """
    if config.training.only_rows_from is not None:
        freeze_all_but_rows(model, config.training.only_rows_from)
    if config.adapter is not None:
        add_adapter(model, config.adapter)
    frozen = config.training.freeze
    return {
        name: parameter.requires_grad and last_match(name, frozen) is None
        for name, parameter in model.named_parameters()
    }


def patterns(config: RunConfig) -> dict[str, list[str]]:
    """Returns configuration key -> patterns of parameter names, without keys that have no patterns."""
    found = {
        "training.freeze": list(config.training.freeze),
        "optimizer.lr_multipliers": list(config.optimizer.lr_multipliers),
    }
    return {key: given for key, given in found.items() if given}


def check_patterns(config: RunConfig, trained: Mapping[str, bool]) -> None:
    """Checks the patterns of parameter names in a config.

    Args:
        trained: parameter name -> whether the run trains it.

    Raises:
        UserError: a pattern matches no parameter, a learning rate multiplier matches only frozen parameters, or all
            parameters are frozen.
    """
    for key, given in patterns(config).items():
        raise_if_unmatched(key, given, trained)
    if not any(trained.values()):
        raise UserError("training.freeze: the patterns freeze all parameters; remove one of the patterns")
    for pattern in config.optimizer.lr_multipliers:
        names = [name for name in trained if last_match(name, [pattern]) is not None]
        if not any(trained[name] for name in names):
            raise UserError(
                f"optimizer.lr_multipliers: {pattern!r} matches only frozen parameters, such as {names[0]}; remove it"
            )
