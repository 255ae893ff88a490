"""Defines `weft.generate`, which continues texts or token ids."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import nn

from weft.checkpoint.adapter_record import read_adapter_record
from weft.checkpoint.adapter_start import check_adapter_fits
from weft.checkpoint.huggingface.config_files import read_origin
from weft.checkpoint.load import find_checkpoint, tokenizer_folder
from weft.checkpoint.load_model import checkpoint_of, load_model
from weft.data.tokenizers.tokenizer import Prompt, Tokenizer
from weft.errors import UserError
from weft.families.config_json import is_huggingface
from weft.files import folder_stamp
from weft.generation.engine import Engine
from weft.generation.settings import Sampling
from weft.generation.speculative import check_vocabulary
from weft.generation.stream import Piece, Stream
from weft.observe.console import Console
from weft.parallel.world import local_device
from weft.torch_private import version_of

Prompts = TypeVar("Prompts", str, list[str], list[int], list[list[int]])

_KEPT: dict[Any, nn.Module] = {}  # models that `generate` has loaded from paths, by path, files and options
_LOADING = threading.Lock()
_ENGINES: WeakKeyDictionary[nn.Module, tuple[Any, list[int], Engine]] = WeakKeyDictionary()


def generate(
    model: nn.Module | str | Path,
    prompts: Prompts,
    max_new_tokens: int = 32,
    temperature: float = 0.0,
    ignore_eos: bool = False,
    draft: nn.Module | str | Path | None = None,
    lookup: int = 0,
    quantize: str | None = None,
    adapter: str | Path | None = None,
    **settings: Any,
) -> Prompts:
    """Continues prompts. A continuation does not depend on the other prompts.

    >>> text = weft.generate("runs/run", "Kalo mi", max_new_tokens=4)
    >>> model = weft.load_model("runs/run")
    >>> weft.generate(model, ["Kalo mi", "Ren"], max_new_tokens=4)[0] == text
    True
    >>> len(weft.generate(model, [5, 6, 7], max_new_tokens=3, temperature=0.8, seed=1, ignore_eos=True))
    3

    Args:
        model: path of a run directory, a checkpoint or a Hugging Face folder; or a module that `weft.load_model`
            returned. A model that is given by its path (loaded on a GPU, if available) and its draft are kept for
            further calls, until a call loads other models, a file changes, or `weft.free_models` is called.
        prompts: a text or a list of token ids; or a list of several texts or of several lists of ids. Texts require
            that the model has a tokenizer.
        max_new_tokens: maximum number of new tokens per prompt.
        temperature: divisor of the logits; 0: greedy decoding.
        ignore_eos: whether to continue after a token that ends a text.
        draft: path or module of a smaller model with the same tokenizer, which proposes tokens (speculative decoding).
        lookup: maximum number of tokens that are proposed at a time because they followed the last occurrence of the
            text's last 3 or 2 tokens (prompt look-up); 0: none.
        quantize: "int8" or "int4": quantizes the weights of a model that is given as a path, as `weft.load_model` does.
        adapter: folder of a LoRA adapter that PEFT's `save_pretrained` wrote, or a run with an adapter, which is added
            to the model for this call.
        settings: other attributes of `weft.Sampling`, such as `top_p`, `stop` and `json_schema`. Equal prompts get
            different random numbers. `n` and `logprobs` need a `weft.Engine`.

    Returns:
        The continuation of the prompt, without the prompt and without the token that ended the continuation: a text for
        a text, and a list of ids for a list of ids. For a list of prompts, a list of continuations.

    Raises:
        UserError: the model does not exist; there is no tokenizer for texts; a prompt is empty or has ids outside the
            vocabulary; a setting is unknown or out of range; the adapter does not fit the model; or a prompt is too
            long for the model.
    """
    sampling = make_sampling(max_new_tokens, temperature, settings)  # checked before the model is loaded
    single = isinstance(prompts, str) or isinstance(next(iter(prompts), None), int)
    if quantize is not None and isinstance(model, nn.Module):
        raise UserError("quantize has an effect only with the path of a model; give it to weft.load_model instead")
    many = [prompts] if single else list(prompts)
    found: Any = _generate(model, many, sampling, ignore_eos, draft, lookup, quantize, adapter)
    return found[0] if single else found


def make_sampling(max_new_tokens: int, temperature: float, settings: dict[str, Any]) -> Sampling:
    """Returns the settings of `generate`. Raises UserError for unknown settings, and for `n` and `logprobs`."""
    known = [name for name in Sampling.__dataclass_fields__ if name not in ("n", "logprobs", "tempered_logprobs")]
    for name in settings:
        if name not in known:
            raise UserError(f"generate has no setting {name!r}; use one of {', '.join(known)}")
    return Sampling(max_new_tokens, temperature, **settings)


def _generate(
    model: nn.Module | str | Path,
    prompts: list,
    sampling: Sampling,
    ignore_eos: bool,
    draft: nn.Module | str | Path | None,
    lookup: int,
    quantize: str | None,
    adapter: str | Path | None,
) -> list:
    if not prompts:
        return []
    checkpoint = checkpoint_of(model) if isinstance(model, nn.Module) else find_checkpoint(model)
    if adapter is not None and checkpoint is not None:
        check_adapter_fits(adapter, checkpoint)  # refused before the model is loaded
    needs_tokenizer = isinstance(prompts[0], str) or sampling.stop or sampling.constraint
    tokenizer = tokenizer_of(checkpoint) if needs_tokenizer else None
    loaded, proposing = _load_models((model, quantize), (draft, None))
    stop_ids = frozenset() if ignore_eos else stop_ids_of(checkpoint)
    engine = engine_of(loaded, tokenizer, proposing, lookup)
    if adapter is None:
        return _continue(engine, prompts, sampling, stop_ids)
    # The files may change until the next call, so the engine does not keep the adapter.
    name = f"weft.generate {adapter} {threading.get_ident()}"
    engine.add_adapter(name, adapter)
    try:
        return _continue(engine, prompts, sampling, stop_ids, name)
    finally:
        engine.remove_adapter(name)


def _continue(
    engine: Engine, prompts: list, sampling: Sampling, stop_ids: Collection[int], adapter: str | None = None
) -> list:
    """Returns the continuations of texts or lists of token ids with an engine and one of its adapters."""
    tokenizer = engine.tokenizer
    if isinstance(prompts[0], str):
        assert tokenizer is not None
        encoded = [tokenizer.prompt(text) for text in prompts]
        written = [prompt.text for prompt in encoded]
        for number, piece in stream_pieces(engine, encoded, sampling, stop_ids=stop_ids, adapter=adapter):
            written[number] += piece.text
        # `Prompt.text` does not have the blank at the end of a prompt; the model generates the blank.
        return [full[len(text) :] for full, text in zip(written, prompts, strict=True)]
    ids: list[list[int]] = [[] for _ in prompts]
    for number, piece in stream_pieces(engine, prompts, sampling, stop_ids=stop_ids, adapter=adapter):
        if piece.token is not None and piece.token not in stop_ids:
            ids[number].append(piece.token)
    return ids


def _load_models(*wanted: tuple[Any, str | None]) -> list[Any]:
    """Returns modules for modules and paths. Keeps the models that it loads, until other models are loaded.

    Args:
        wanted: (module, path or None; `quantize`) for each model.
    """
    device = local_device(Console())
    keys = [
        None if isinstance(one, nn.Module | None) else (*_identity(find_checkpoint(one)), how, device)
        for one, how in wanted
    ]
    with _LOADING:
        if any(key is not None and key not in _KEPT for key in keys):
            _free(_KEPT.keys() - keys)  # before loading, which needs the memory
        for (one, how), key in zip(wanted, keys, strict=True):
            if key is not None and key not in _KEPT:
                _KEPT[key] = load_model(one, device, quantize=how)
        return [one if key is None else _KEPT[key] for (one, _), key in zip(wanted, keys, strict=True)]


def _identity(checkpoint: Path) -> tuple:
    """Returns a value that changes when the files of a checkpoint or of a Hugging Face folder change."""
    record = read_adapter_record(checkpoint)
    return *folder_stamp(checkpoint), *(() if record is None else _identity(find_checkpoint(record.base.path)))


def free_models() -> None:
    """Frees the models that `weft.generate` has loaded from paths and keeps for further calls.

    >>> text = weft.generate("runs/run", "Kalo mi", max_new_tokens=4)
    >>> weft.free_models()
    """
    with _LOADING:
        _free(list(_KEPT))


def _free(keys: Iterable[Any]) -> None:
    for key in keys:
        _ENGINES.pop(_KEPT.pop(key), None)  # the engine of a model refers to this model if it is its own draft


def engine_of(
    model: nn.Module, tokenizer: Tokenizer | None = None, draft: nn.Module | None = None, lookup: int = 0
) -> Engine:
    """Returns the engine of a model. Later calls return the same engine; its cache is cleared if parameters changed.

    Args:
        model, tokenizer, draft, lookup: as in `Engine`. A change of `draft` or `lookup` creates a new engine.
    """
    models = [model] if draft is None else [model, draft]
    versions = [version_of(p) for one in models for p in one.parameters() if not p.is_inference()]
    options = (draft, lookup)
    before, known, engine = _ENGINES.get(model, (options, versions, None))
    if engine is None or before != options:
        proxy: Any = weakref.proxy(model)  # a strong reference would keep the model alive
        engine = Engine(proxy, draft=draft, lookup=lookup)
        if draft is not None:
            check_vocabulary(model, draft)  # the engine cannot find the checkpoint of a proxy
    elif known != versions:
        engine.clear()
    engine.tokenizer = tokenizer
    _ENGINES[model] = options, versions, engine
    return engine


def stream_pieces(
    engine: Engine,
    prompts: Sequence[Prompt | Sequence[int]],
    sampling: Sampling,
    *,
    stop_ids: Collection[int] | None = None,
    adapter: str | None = None,
) -> Iterator[tuple[int, Piece]]:
    """Yields (index of the prompt, piece) while text is generated. Equal prompts get different random numbers.

    The continuations are cancelled if the iterator is closed.

    Args:
        engine: the engine.
        prompts: tokenized prompts or token ids.
        sampling: the settings.
        stop_ids: tokens that end a continuation. Default: the `stop_ids` of the engine.
        adapter: name of an adapter of the engine; None: the model without an adapter.

    Raises:
        UserError: a prompt is invalid or too long (see `Engine.submit`); raised by the call, before the first piece.
    """
    return _read_streams(engine, engine.submit_all(prompts, sampling, stop_ids=stop_ids, adapter=adapter))


def _read_streams(engine: Engine, submitted: list[Stream]) -> Iterator[tuple[int, Piece]]:
    streams = dict(enumerate(submitted))
    try:
        while streams:
            for number, stream in list(streams.items()):
                if stream.error is not None:
                    raise stream.error
                finished = stream.finished
                yield from ((number, piece) for piece in stream.ready())
                if finished:
                    del streams[number]
            if streams:
                engine.step()
    finally:
        for stream in streams.values():
            stream.cancel()


def generate_ids(
    model: nn.Module,
    prompts: Sequence[Prompt | Sequence[int]],
    sampling: Sampling,
    *,
    stop_ids: Collection[int] = frozenset(),
    **options: Any,
) -> list[list[int]]:
    """Returns the new tokens of each prompt, including a final stop token. Creates an engine for this call.

    Args:
        model: the model. If it is sharded, all ranks must make the same call.
        prompts: tokenized prompts or token ids.
        sampling: the settings.
        stop_ids: tokens that end a continuation.
        options: keyword arguments of `Engine`.

    Raises:
        UserError: a prompt is invalid or too long (see `Engine.submit`).
    """
    ids: list[list[int]] = [[] for _ in prompts]
    for number, piece in stream_pieces(Engine(model, stop_ids=stop_ids, **options), prompts, sampling):
        if piece.token is not None:
            ids[number].append(piece.token)
    return ids


def tokenizer_of(checkpoint: Path | None) -> Tokenizer:
    """Loads the tokenizer of a checkpoint.

    Args:
        checkpoint: path that `weft.checkpoint.load.find_checkpoint` returned; None for a module without a path.

    Raises:
        UserError: `checkpoint` is None or has no tokenizer.
    """
    if checkpoint is None:
        raise UserError(
            "texts need a tokenizer; pass a path or a model that weft.load_model returned, or prompts of token ids"
        )
    folder = tokenizer_folder(checkpoint)
    if folder is not None:
        return _load_tokenizer(folder, folder_stamp(folder))
    if is_huggingface(checkpoint) or checkpoint.absolute().parent.name != "checkpoints":
        raise UserError(
            "there is no tokenizer.json with this model; put the tokenizer's files into this folder", checkpoint
        )
    raise UserError(
        "this run has no tokenizer; set `tokenizer:` in the run file and train again, or pass token ids",
        checkpoint.parent.parent,
    )


def stop_ids_of(checkpoint: Path | None) -> set[int]:
    """Returns the tokens that end a text: the end-of-document token, and the tokens in generation_config.json.

    Chat models need the tokens in generation_config.json, because these models end a message with another token than
    the end-of-document token. If `checkpoint` is None, the set is empty.
    """
    if checkpoint is None:
        return set()
    ids = (read_origin(checkpoint).get("generation_config") or {}).get("eos_token_id")
    found = set(ids) if isinstance(ids, list) else set() if ids is None else {ids}
    folder = tokenizer_folder(checkpoint)
    return found | {_load_tokenizer(folder, folder_stamp(folder)).eod_id} if folder is not None else found


@functools.lru_cache(maxsize=2)
def _load_tokenizer(folder: Path, stamp: tuple) -> Tokenizer:
    return Tokenizer.load(folder)
