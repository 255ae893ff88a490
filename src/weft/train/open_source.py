"""Opens a source of samples: a token store, whose documents are packed into sequences, or a custom dataset."""

from __future__ import annotations

import numpy as np

from weft.config.components import make_component
from weft.config.data import DatasetSection
from weft.config.derive import sequence_length
from weft.config.objective_data import ObjectiveData, mismatch, would_split
from weft.config.run import RunConfig
from weft.data.batches.layout import PLAIN, Layout
from weft.data.batches.samples import Dataset
from weft.data.sequences.packed import PackedDataset
from weft.data.sequences.windows import StoreDataset
from weft.data.stores.store import StoreInfo, TokenStore
from weft.errors import UserError
from weft.observe.console import Console


def open_source(
    chosen: str | DatasetSection, config: RunConfig, console: Console | None = None, layout: Layout = PLAIN
) -> tuple[Dataset, StoreInfo | None]:
    """Opens a token store or a custom dataset. `data.packing` decides how a store is split into sequences.

    Args:
        chosen: path of a token store, or the config section of a custom dataset.

    Returns:
        The dataset, and the token store's `StoreInfo` (None for a custom dataset).

    Raises:
        UserError: the store is damaged, or does not have the documents, fields or samples that the objective needs; or
            a custom dataset has no length.
    """
    if isinstance(chosen, DatasetSection):
        dataset = make_component(chosen, "dataset")
        try:
            len(dataset)
        except (TypeError, ValueError, OverflowError) as error:  # Python's own, as for a length below 0
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise  # the method itself raised it
            raise UserError(f"{chosen.type}: its __len__ does not return a number of samples: {error}") from None
        return dataset, None
    other = next((name for name, declared in layout.fields.items() if not declared.per_document), None)
    if other is not None or layout.sequences > 1:
        need = f"samples of {layout.sequences} sequences" if other is None else f"the field {other!r}"
        raise UserError(
            f"the objective {config.objective.type} needs {need}, which a token store does not have; give a custom "
            "dataset",
            chosen,
        )
    stored = {name: declared for name, declared in layout.fields.items() if name not in layout.computed}
    objective, needs = config.objective.type, ObjectiveData(layout.data, tuple(stored))
    store, length, packing = TokenStore(chosen), sequence_length(config), config.data.packing
    what = mismatch(objective, needs, store.info.kind, store.fields)
    if what is not None:
        raise UserError(what, chosen)
    for name, declared in stored.items():
        try:
            declared.check_choices(store.fields[name])
        except ValueError as error:
            raise UserError(f"the field {name!r} of the documents {error}; fix the records", chosen) from None
    if console is not None and (unused := sorted(store.fields.keys() - layout.fields.keys())):
        console.warning(f"{chosen}: the objective {objective} does not use the field {unused[0]!r} of the documents")
    if packing in ("best_fit", "pad"):
        values = {name: store.fields[name].astype(declared.dtype) for name, declared in stored.items()}
        values |= {name: np.zeros(store.num_documents) for name in layout.computed}  # set by `fill_logprobs`
        pad, last = packing == "pad", layout.last_tokens
        dataset = PackedDataset(store, length, pad=pad, values=values, last_tokens=last, console=console)
        return dataset, store.info
    if needs.whole or layout.computed:
        raise UserError(f"data.packing: {would_split(objective, needs)}", chosen)
    return StoreDataset(store, length, document_attention=config.data.document_attention), store.info
