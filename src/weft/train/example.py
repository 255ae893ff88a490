"""Writes an example of the training data into the run directory, for the report."""

from __future__ import annotations

import json

from weft.data.conversations.show_mask import mask_runs
from weft.data.stores.store import TokenStore
from weft.files import replace_file
from weft.observe.report import EXAMPLE
from weft.train.job import Job

TRIED, LONGEST = 32, 1024  # number of documents that are tried, and the most tokens of an example


def write_example(job: Job) -> None:
    """Writes the text of a document with a loss mask, and which parts of the text are trained on.

    Writes nothing if the run has no tokenizer, or if its training data have no loss mask.
    """
    (job.run.path / EXAMPLE).unlink(missing_ok=True)
    tokenizer = job.run.tokenizer()
    if tokenizer is None:
        return
    for key, path in job.config.data.stores.items():
        store = TokenStore(path)
        if store.loss_mask is None:
            continue
        for number in range(min(TRIED, store.num_documents)):
            start = int(store.offsets[number]) // store.tokens.itemsize
            part = slice(start, start + min(LONGEST, int(store.lengths[number])))
            ids, mask = store.tokens[part], store.loss_mask[part]
            if mask.any():
                example = {"source": key, "document": number, "runs": mask_runs(ids, mask, tokenizer.decode)}
                replace_file(job.run.path / EXAMPLE, json.dumps(example, ensure_ascii=False), durable=False)
                return
