"""Adapts a model to the interface of EleutherAI's lm-evaluation-harness (Gao et al., 2023).

Importing this module requires the harness.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import nn

from weft.data.conversations.template import ChatTemplate, find_template, special_tokens
from weft.data.sources.values import Unfit
from weft.data.tokenizers.tokenizer import Tokenizer
from weft.errors import UserError
from weft.generation.engine import Engine
from weft.generation.settings import Sampling
from weft.generation.text import stream_pieces
from weft.models.forward import forward_of
from weft.observe.console import Console

LOGITS = 1 << 28  # maximum number of logits of a batch, unless a single text has more
DEFAULT_LENGTH = 2048  # maximum length of a model without max_position_embeddings
GENERATION_KEYS = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p"}  # of generation_kwargs


class WeftLM(TemplateLM):
    """A model that answers the harness's requests, with the same scores as the harness's own `hf` model.

    Like the `hf` model, this class adds the tokenizer's special tokens (such as a beginning-of-text token) to a text.
    If a text is longer than the model's maximum, the class removes tokens at the text's start.

    Args:
        model: a module that `weft.load_model` returned, in eval mode.
        tokenizer: the model's tokenizer.
        batch_size: maximum number of texts per batch. Batches are smaller if their logits would take more than a
            gigabyte.
        console: prints progress.
        template_folder: folder with the chat template. Default: the tokenizer's folder.

    Attributes:
        requested: whether the harness has made a request. Exceptions before the first request come from building the
            tasks.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer,
        *,
        batch_size: int = 8,
        console: Console | None = None,
        template_folder: Path | None = None,
    ):
        super().__init__()
        self.model, self._tokenizer, self.batch_size = model, tokenizer, batch_size
        self.console = console or Console(prints=False)
        config = getattr(model, "config", None)
        self.max_length = getattr(config, "max_position_embeddings", None) or DEFAULT_LENGTH
        self.vocab_size = getattr(config, "vocab_size", None) or tokenizer.vocab_size
        self.requested = False
        self._device = next(model.parameters()).device
        self._call = forward_of(model)
        self._folder = tokenizer.path if tokenizer.path.is_dir() else tokenizer.path.parent
        self._special = special_tokens(self._folder)
        self._template_folder = template_folder or self._folder
        begin = self._special.get("bos_token")
        self._bos_id = None if begin is None else tokenizer.token_id(begin)
        self._template: ChatTemplate | None = None

    @property
    def eot_token_id(self) -> int:
        """The id of the end-of-document token."""
        return self._tokenizer.eod_id

    @property
    def prefix_token_id(self) -> int:
        """The id of the token put before a text: beginning-of-text or, if there is no such token, end-of-document."""
        return self.eot_token_id if self._bos_id is None else self._bos_id

    @property
    def tokenizer_name(self) -> str:
        """The digest of the tokenizer, under which the harness caches requests."""
        return self._tokenizer.digest

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Encodes a text. By default, special tokens are added unless the text begins with the prefix token.

        Args:
            string: the text.
            add_special_tokens: whether special tokens are added; None: the default.
        """
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self._tokenizer.decode([self.prefix_token_id]))
        return self._tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Selects a chat template, and returns the template's source.

        Args:
            chat_template: name of the template; True: the tokenizer's default; False: no template (returns None).
        """
        if chat_template is False or chat_template is None:
            return None
        try:
            text = find_template(self._template_folder, chat_template if isinstance(chat_template, str) else None)
        except UserError as error:  # the remedy in this message is an option of packing
            what = error.what.partition("; ")[0]
            raise UserError(f"{what}; put a chat_template.jinja next to tokenizer.json", error.where) from None
        self._template = ChatTemplate(text, self._special)
        return text.source

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Formats messages with the chat template. If the template refuses the messages, system messages are left out.

        Args:
            chat_history: the messages, with the keys `role` and `content`.
            add_generation_prompt: whether the text ends with the beginning of an answer. If False, the text ends after
                the content of the last message, so that the model can continue it.
        """
        if self._template is None:
            self.chat_template(True)
        assert self._template is not None
        try:
            text, _ = self._template.render(chat_history, prompt=add_generation_prompt)
        except Unfit as error:
            chat_history = [message for message in chat_history if message["role"] != "system"]
            try:
                text, _ = self._template.render(chat_history, prompt=add_generation_prompt)
            except Unfit:
                raise UserError(str(error), self._template.source.origin) from None
        return text if add_generation_prompt else _open_ended(text, chat_history[-1]["content"])

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Scores (context, continuation) pairs.

        Returns:
            For each pair, the continuation's log-probability, and whether greedy decoding gives the continuation.
        """
        self.requested = True
        for request in requests:
            if not request.args[1]:
                raise UserError(f"the task {request.task_name} has a question with an empty answer; fix the task")
        return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = True) -> list[float]:
        """Returns the log-probability of each text, computed in disjoint windows of the model's maximum length."""
        self.requested = True
        owners, pieces = [], []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1):
                owners.append(number)
                pieces.append((None, *make_disjoint_window(window)))
        sums = [0.0] * len(requests)
        for number, (logprob, _) in zip(owners, self._loglikelihood_tokens(pieces), strict=True):
            sums[number] += logprob
        return sums

    def _loglikelihood_tokens(self, requests, **_: Any) -> list[tuple[float, bool]]:
        """Scores requests, each (unused, context ids, continuation ids). Returns the same values as `loglikelihood`.

        If texts differ only in the last token, the logits are computed once for all of them.
        """
        by_inputs: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for number, (_, context, continuation) in enumerate(requests):
            if not 0 < len(continuation) <= self.max_length:
                raise UserError(
                    f"an answer has {len(continuation):,} tokens, but the model allows 1 to {self.max_length:,}; fix "
                    "the task"
                )
            by_inputs[tuple((context + continuation)[-(self.max_length + 1) : -1])].append(number)
        found: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        done = 0
        with torch.no_grad(), self.console.progress(len(requests), "scoring", "answer") as bar:
            for texts in self._batches(list(by_inputs)):
                ids = torch.zeros(len(texts), len(texts[0]), dtype=torch.int64)
                for row, text in enumerate(texts):  # right padding does not affect a causal model
                    ids[row, : len(text)] = torch.tensor(text)
                logits = self._call({"tokens": ids.to(self._device)})
                for row, text in zip(logits, texts, strict=True):
                    for number in by_inputs[text]:
                        found[number] = _score(row[: len(text)], requests[number][2])
                    done += len(by_inputs[text])
                bar.update(done)
        return found

    def _batches(self, texts: list[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
        """Yields batches of texts with similar lengths, from long to short."""
        texts = sorted(texts, key=lambda text: (-len(text), text))
        while texts:
            count = max(1, min(self.batch_size, LOGITS // (len(texts[0]) * self.vocab_size)))
            yield texts[:count]
            texts = texts[count:]

    def generate_until(self, requests, disable_tqdm: bool = True) -> list[str]:
        """Returns the text generated for each request (context, settings), up to the first stop string."""
        self.requested = True
        by_settings: dict[str, list[int]] = defaultdict(list)
        for number, request in enumerate(requests):
            by_settings[json.dumps(request.args[1], sort_keys=True, default=str)].append(number)
        answers = [""] * len(requests)
        done = 0
        with self.console.progress(len(requests), "writing", "answer") as bar:
            for numbers in by_settings.values():
                settings = self._settings(requests[numbers[0]].args[1])
                room = self.max_length - settings["max_gen_toks"]
                if room < 1:
                    raise UserError(
                        f"max_gen_toks is {settings['max_gen_toks']:,}, but the model allows {self.max_length:,} "
                        "tokens including the question; lower max_gen_toks in the task's generation_kwargs"
                    )
                prompts = {n: (self.tok_encode(requests[n].args[0]) or [self.prefix_token_id])[-room:] for n in numbers}
                numbers = sorted(numbers, key=lambda n: (-len(prompts[n]), prompts[n]))
                for index, text in self._generate([prompts[n] for n in numbers], settings):
                    answers[numbers[index]] = text
                    done += 1
                    bar.update(done)
        return answers

    def _settings(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        settings: dict[str, Any] = dict(normalize_gen_kwargs(kwargs, default_max_gen_toks=256))
        unknown = settings.keys() - GENERATION_KEYS
        if unknown:
            raise UserError(
                f"generation_kwargs: {sorted(unknown)[0]} is not supported; remove it from the task (supported: "
                f"{', '.join(sorted(GENERATION_KEYS))})"
            )
        settings["until"] = handle_stop_sequences(settings["until"], eos=self._tokenizer.decode([self.eot_token_id]))
        return settings

    def _generate(self, prompts: list[list[int]], settings: dict[str, Any]) -> Iterator[tuple[int, str]]:
        """Yields (index of the prompt, generated text), in the order in which the texts end.

        Args:
            settings: the harness's settings of a generation task, such as `until` and `max_gen_toks`.
        """
        stops = tuple(stop for stop in settings["until"] if stop)
        sampling = Sampling(settings["max_gen_toks"], temperature=0.0, stop=stops)
        if settings.get("do_sample", False) and settings.get("temperature") != 0:
            drawn = {key: settings[key] for key in ("temperature", "top_k", "top_p") if key in settings}
            sampling = Sampling(settings["max_gen_toks"], **drawn, stop=stops)
        engine = Engine(self.model, self._tokenizer, stop_ids={self.eot_token_id}, max_batch=self.batch_size)
        written: list[list[int]] = [[] for _ in prompts]
        for index, piece in stream_pieces(engine, prompts, sampling):
            if piece.token is not None and piece.token != self.eot_token_id:
                written[index].append(piece.token)
            if piece.finish is not None:
                text = self._tokenizer.decode(written[index], skip_special_tokens=True)
                yield index, postprocess_generated_text(text, list(stops), None)


def _score(logits: torch.Tensor, continuation: list[int]) -> tuple[float, bool]:
    """Scores a continuation.

    Args:
        logits: `[seq, vocab]`; the last `len(continuation)` rows predict the continuation.
        continuation: token ids.

    Returns:
        The continuation's log-probability, and whether each of its tokens has the highest logit.
    """
    logprobs = logits[-len(continuation) :].log_softmax(-1)
    chosen = torch.tensor(continuation, device=logits.device)
    return logprobs.gather(1, chosen.unsqueeze(1)).sum().item(), bool((logprobs.argmax(-1) == chosen).all())


def _open_ended(text: str, last: str) -> str:
    """Truncates `text`, a formatted conversation, after `last`, the content of the conversation's last message."""
    end = text.rfind(last.strip()) + len(last.strip())
    blanks = last[len(last.rstrip()) :]
    return text[:end] + (blanks if text[end:].startswith(blanks) else "")
