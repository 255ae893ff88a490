"""A model as EleutherAI's lm-evaluation-harness asks it (Gao et al., 2023). Imported only where that is installed."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
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
from weft.generation.sample import Sampling, generate_steps
from weft.models.forward import forward_of
from weft.observe.console import Console

HELD = 1 << 28  # logits held at once at most, unless one text has more
UNSAID = 2048  # tokens that a model takes which does not say how many
KNOWN = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p"}  # generation_kwargs


class WeftLM(TemplateLM):
    """Answers the harness's requests, with the scores of its own `hf` model.

    As there, a text is framed by what the tokenizer puts around one (a beginning-of-text token, say), and what is
    longer than the model was made for loses its beginning.

    Args:
        model: as `weft.load_model` gives it, in eval mode.
        tokenizer: the model's.
        batch_size: texts at once; less where their logits would take more than a gigabyte.
        console: shows how far it is.

    Attributes:
        asked: whether there has been a request; before it, all failures are the tasks'.
    """

    def __init__(self, model: nn.Module, tokenizer: Tokenizer, *, batch_size: int = 8, console: Console | None = None):
        super().__init__()
        self.model, self.text, self.batch_size = model, tokenizer, batch_size
        self.console = console or Console(speaks=False)
        config = getattr(model, "config", None)
        self.max_length = getattr(config, "max_position_embeddings", None) or UNSAID
        self.vocab_size = getattr(config, "vocab_size", None) or tokenizer.vocab_size
        self.asked = False
        self._device = next(model.parameters()).device
        self._call = forward_of(model)
        self._folder = tokenizer.path if tokenizer.path.is_dir() else tokenizer.path.parent
        self._special = special_tokens(self._folder)
        begin = self._special.get("bos_token")
        self._bos_id = None if begin is None else tokenizer.token_id(begin)
        self._template: ChatTemplate | None = None

    @property
    def eot_token_id(self) -> int:
        """The end-of-document token."""
        return self.text.eod_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text's first token: the beginning-of-text token, or without one the end of another."""
        return self.eot_token_id if self._bos_id is None else self._bos_id

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer where the harness keeps built requests."""
        return self.text.digest

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """A text's ids, framed unless it says otherwise or begins with the beginning-of-text token already."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.text.decode([self.prefix_token_id]))
        return self.text.encode(string, add_special_tokens=add_special_tokens)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template's source; None where none is to be used."""
        if chat_template is False or chat_template is None:
            return None
        try:
            text = find_template(self._folder, chat_template if isinstance(chat_template, str) else None)
        except UserError as error:  # it tells of an option that packing has
            what = error.what.partition("; state one")[0]
            raise UserError(f"{what}; put its chat_template.jinja beside tokenizer.json", error.where) from None
        self._template = ChatTemplate(text, self._special)
        return text.source

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Messages as text, ending with the beginning of an answer, or else in the midst of the last message.

        A template that refuses a system message is asked again without one.
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
        """For each (context, continuation): the continuation's log-probability, and whether it is the likeliest."""
        self.asked = True
        for request in requests:
            if not request.args[1]:
                raise UserError(
                    f"the task {request.task_name} asks for the probability of an empty answer; mend the task"
                )
        return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = True) -> list[float]:
        """For each text: the log-probability of all of it, in windows of the model's length without an overlap."""
        self.asked = True
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
        """For each (anything, context's ids, continuation's ids): as `loglikelihood`.

        Texts that are equal but for the last token are read once.
        """
        wanted: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for number, (_, context, continuation) in enumerate(requests):
            if not 0 < len(continuation) <= self.max_length:
                raise UserError(
                    f"an answer of {len(continuation):,} tokens, where the model takes 1 to {self.max_length:,}; "
                    "mend the task"
                )
            wanted[tuple((context + continuation)[-(self.max_length + 1) : -1])].append(number)
        found: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        done = 0
        with torch.no_grad(), self.console.progress(len(requests), "scoring", "answer") as bar:
            for rows in self._batches(list(wanted)):
                ids = torch.zeros(len(rows), len(rows[0]), dtype=torch.int64)
                for row, text in enumerate(rows):  # what is behind a text's end changes nothing in it
                    ids[row, : len(text)] = torch.tensor(text)
                logits = self._call({"tokens": ids.to(self._device)})
                for row, text in zip(logits, rows, strict=True):
                    for number in wanted[text]:
                        found[number] = _score(row[: len(text)], requests[number][2])
                    done += len(wanted[text])
                bar.update(done)
        return found

    def _batches(self, texts: list[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
        """Texts of like lengths together, long ones first."""
        texts = sorted(texts, key=lambda text: (-len(text), text))
        while texts:
            rows = max(1, min(self.batch_size, HELD // (len(texts[0]) * self.vocab_size)))
            yield texts[:rows]
            texts = texts[rows:]

    def generate_until(self, requests, disable_tqdm: bool = True) -> list[str]:
        """For each (context, settings): the text that the model writes on, up to the first of the stop strings."""
        self.asked = True
        alike: dict[str, list[int]] = defaultdict(list)
        for number, request in enumerate(requests):
            alike[json.dumps(request.args[1], sort_keys=True, default=str)].append(number)
        answers = [""] * len(requests)
        done = 0
        with self.console.progress(len(requests), "writing", "answer") as bar:
            for numbers in alike.values():
                settings = self._settings(requests[numbers[0]].args[1])
                room = self.max_length - settings["max_gen_toks"]
                if room < 1:
                    raise UserError(
                        f"max_gen_toks is {settings['max_gen_toks']:,}, and the model takes {self.max_length:,} tokens "
                        "with the question; ask for fewer in the task's generation_kwargs"
                    )
                prompts = {n: (self.tok_encode(requests[n].args[0]) or [self.prefix_token_id])[-room:] for n in numbers}
                numbers = sorted(numbers, key=lambda n: (-len(prompts[n]), prompts[n]))
                for start in range(0, len(numbers), self.batch_size):
                    some = numbers[start : start + self.batch_size]
                    for number, text in zip(some, self._write([prompts[n] for n in some], settings), strict=True):
                        answers[number] = text
                    done += len(some)
                    bar.update(done)
        return answers

    def _settings(self, stated: dict[str, Any]) -> dict[str, Any]:
        settings: dict[str, Any] = dict(normalize_gen_kwargs(stated, default_max_gen_toks=256))
        unknown = settings.keys() - KNOWN
        if unknown:
            raise UserError(
                f"generation_kwargs: {sorted(unknown)[0]} is not known here; leave it out of the task (there are "
                f"{', '.join(sorted(KNOWN))})"
            )
        settings["until"] = handle_stop_sequences(settings["until"], eos=self.text.decode([self.eot_token_id]))
        return settings

    def _write(self, prompts: list[list[int]], settings: dict[str, Any]) -> list[str]:
        """What the model writes after each prompt."""
        stops = [stop for stop in settings["until"] if stop]
        reach = max(len(stop.encode()) for stop in stops)  # a token of text has a byte at least
        written: list[list[int]] = [[] for _ in prompts]
        open_rows = set(range(len(prompts)))
        sampling = Sampling(settings["max_gen_toks"], temperature=0.0)
        if settings.get("do_sample", False):
            drawn = (settings.get("temperature", 1.0), settings.get("top_k"), settings.get("top_p"))
            sampling = Sampling(settings["max_gen_toks"], *drawn)
        for new in generate_steps(self.model, prompts, sampling, stop_ids={self.eot_token_id}):
            for row in sorted(open_rows):
                token = new[row]
                if token is None or token == self.eot_token_id:
                    open_rows.discard(row)
                    continue
                written[row].append(token)
                if self._stopped(written[row], stops, reach):
                    open_rows.discard(row)
            if not open_rows:
                break
        return [postprocess_generated_text(self._said(ids), stops, None) for ids in written]

    def _stopped(self, ids: Sequence[int], stops: list[str], reach: int) -> bool:
        """Whether a stop string has been written; looked for at the end first, where it would be new."""
        tail = self._said(ids[-reach:])
        return any(stop in tail for stop in stops) and any(stop in self._said(ids) for stop in stops)

    def _said(self, ids: Sequence[int]) -> str:
        return self.text.decode(ids, skip_special_tokens=True)


def _score(logits: torch.Tensor, continuation: list[int]) -> tuple[float, bool]:
    """Of logits `[seq, vocab]`, the last ones the continuation's: its log-probability, and whether it is likeliest."""
    logprobs = logits[-len(continuation) :].log_softmax(-1)
    chosen = torch.tensor(continuation, device=logits.device)
    return logprobs.gather(1, chosen.unsqueeze(1)).sum().item(), bool((logprobs.argmax(-1) == chosen).all())


def _open_ended(text: str, last: str) -> str:
    """A rendered conversation, cut off behind its last message's words."""
    end = text.rfind(last.strip()) + len(last.strip())
    blanks = last[len(last.rstrip()) :]
    return text[:end] + (blanks if text[end:].startswith(blanks) else "")
