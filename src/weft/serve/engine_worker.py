"""Defines `EngineWorker`, the thread that runs an engine for requests of an event loop."""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from weft.data.tokenizers.tokenizer import Prompt
from weft.errors import UserError, describe_exception
from weft.generation.engine import Engine
from weft.generation.settings import Sampling
from weft.generation.stream import Piece, Stream
from weft.parallel.ranks import broadcast_object

logger = logging.getLogger("weft.serve")
FAILURES = 3  # steps in a row that fail, after which the thread gives up
HEARTBEAT = 60.0  # seconds: ranks of an idle sharded model communicate so often, so that no collective times out


class EngineFailure(Exception):
    """A failure of the engine, which the request did not cause."""


class Busy(Exception):
    """The engine has too many unfinished sequences."""


@dataclass(frozen=True)
class Submit:
    """Command: adds the prompts of a request. See `Engine.submit_all`."""

    id: int
    prompts: tuple[Prompt | Sequence[int], ...]
    sampling: Sampling
    stop_ids: Collection[int] | None
    adapter: str | None


@dataclass(frozen=True)
class Cancel:
    """Command: cancels the request of the command `Submit` with the same id."""

    id: int


@dataclass(frozen=True)
class Call:
    """Command: calls a function of the engine, such as `Engine.remove_adapter`; None: only answers."""

    id: int
    function: Callable[..., Any] | None
    args: tuple = ()


@dataclass(frozen=True)
class Stop:
    """Command: ends the thread."""


Command = Submit | Cancel | Call | Stop


class Generation:
    """The continuations of a request's prompts, in the event loop. An asynchronous context manager that cancels them.

    Attributes:
        pieces: number of pieces that have arrived.
    """

    def __init__(self, worker: EngineWorker, id: int, prompts: int, n: int):
        self._worker, self._id, self._n = worker, id, n
        self.sequences = prompts * n
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.pieces = 0
        self._open = self.sequences
        self._new: list[tuple[int, Piece]] = []
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._worker.end(self)

    async def read(self) -> AsyncIterator[list[tuple[int, Piece]]]:
        """Yields (index of the choice, piece), all that are ready at a time. The choices of a prompt are adjacent.

        Raises:
            UserError: the request cannot be continued.
            EngineFailure: the engine failed.
        """
        while True:
            await self._changed.wait()
            self._changed.clear()
            new, self._new = self._new, []
            if new:
                yield new
            if self._error is not None:
                raise self._error
            if not self._open:
                return

    def add(self, pieces: list[tuple[int, Piece]], error: Exception | None) -> None:
        """Adds pieces (index of the prompt, piece). Called in the event loop."""
        self._new += [(prompt * self._n + piece.index, piece) for prompt, piece in pieces]
        self.pieces += len(pieces)
        self._open -= sum(piece.finish is not None for _, piece in pieces)
        self._error = self._error or error
        self._changed.set()


class EngineWorker:
    """A thread that owns an engine. It runs steps, and executes the commands of an event loop between two steps.

    The event loop never waits for the engine's lock. The new pieces of a step are handed to the event loop in one call.

    Args:
        engine: the engine, which no other thread uses while this thread runs.
        max_open: maximum number of unfinished sequences.
        sharded: whether the model is sharded over ranks. The first rank broadcasts the commands before each step; the
            other ranks call `follow` instead of `start`.

    Attributes:
        engine: the engine.
        open: number of unfinished sequences, and of those that were announced with `reserve`.
        generations: the unfinished requests, by id.
        failure: why the thread has ended, or None.
        failed: set when the thread has ended because of a failure; for the event loop.
    """

    def __init__(self, engine: Engine, max_open: int, *, sharded: bool = False):
        self.engine, self.max_open, self._sharded = engine, max_open, sharded
        self.open, self.failure = 0, None
        self.failed = asyncio.Event()
        self.generations: dict[int, Generation] = {}
        self._ids = itertools.count()
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._answers: dict[int, Future[Any]] = {}
        self._streams: dict[int, list[Stream]] = {}  # of unfinished requests; only the thread uses it
        self._failures = 0
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # --- In the event loop ---

    def start(self) -> None:
        """Starts the thread. The running event loop receives its pieces."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="weft-engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    async def stop(self, timeout: float) -> None:
        """Ends the thread after its present step. Unfinished requests fail. Waits at most `timeout` seconds."""
        self._commands.put(Stop())
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, timeout)

    def reserve(self, sequences: int) -> None:
        """Counts sequences that are submitted soon. `release` must be called for them.

        Raises:
            Busy: there are too many unfinished sequences.
        """
        if self.open + sequences > self.max_open:
            raise Busy
        self.open += sequences

    def release(self, sequences: int) -> None:
        self.open -= sequences

    async def submit(
        self,
        prompts: Sequence[Prompt | Sequence[int]],
        sampling: Sampling,
        *,
        stop_ids: Collection[int] | None = None,
        adapter: str | None = None,
    ) -> Generation:
        """Adds the prompts of a request when the present step has ended. See `Engine.submit_all`.

        Raises:
            UserError: the engine refuses the request.
            EngineFailure: the thread has ended.
        """
        id = next(self._ids)
        generation = Generation(self, id, len(prompts), sampling.n)
        self.generations[id] = generation
        self._post(Submit(id, tuple(prompts), sampling, stop_ids, adapter))
        try:
            await generation.accepted
        except BaseException:
            self.end(generation)
            raise
        return generation

    async def call(self, function: Callable[..., Any] | None, *args: Any) -> Any:
        """Calls `function(engine, *args)` between two steps, and returns its result. None: waits for the thread only.

        Raises:
            EngineFailure: the thread has ended.
            Exception: what the function raises.
        """
        id, answer = next(self._ids), Future()
        self._answers[id] = answer
        self._post(Call(id, function, args))
        return await asyncio.wrap_future(answer)

    def end(self, generation: Generation) -> None:
        """Forgets a request, and cancels its unfinished sequences."""
        if self.generations.pop(generation._id, None) is not None and self.failure is None:
            self._commands.put(Cancel(generation._id))

    def _post(self, command: Command) -> None:
        self._commands.put(command)
        if self.failure is not None:  # the thread may have ended before or after it has seen the command
            self._fail_all(EngineFailure(self.failure))

    def _deliver(self, batch: list[tuple[int, list[tuple[int, Piece]], Exception | None]], accepted: list[int]) -> None:
        for id in accepted:
            generation = self.generations.get(id)
            if generation is not None and not generation.accepted.done():
                generation.accepted.set_result(None)
        for id, pieces, error in batch:
            generation = self.generations.get(id)
            if generation is None:
                continue
            if error is not None and not generation.accepted.done():
                generation.accepted.set_exception(error)
            generation.add(pieces, error)

    def _fail_all(self, error: Exception) -> None:
        self._deliver([(id, [], error) for id in list(self.generations)], [])
        while self._answers:
            with suppress(KeyError):
                answer = self._answers.popitem()[1]
                if answer.set_running_or_notify_cancel():
                    answer.set_exception(error)

    # --- In the thread ---

    def _run(self) -> None:
        error: Exception = EngineFailure("the server is shutting down")
        try:
            while self.run_commands(self.take()):
                self.run_step()
                self._publish()
        except Exception as caught:
            self.failure = f"the engine failed: {type(caught).__name__}; the server's log has the cause"
            logger.critical("the engine failed: %s", describe_exception(caught), exc_info=caught)
            error = EngineFailure(self.failure)
        with suppress(RuntimeError):  # the event loop is closed
            if self.failure is not None:
                self._in_loop(self.failed.set)
            self._in_loop(self._fail_all, error)

    def follow(self) -> None:
        """Runs the commands and steps of the first rank, on another rank, until the first rank's thread ends."""
        while self.run_commands(broadcast_object([])):
            self.run_step()
            self._publish()

    def _in_loop(self, act: Callable[..., object], *args: object) -> None:
        """Calls a function in the event loop, which only the first rank has."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(act, *args)

    def take(self) -> list[Command]:
        """Returns the next commands. Waits for a command if there are no unfinished requests."""
        commands = []
        with suppress(queue.Empty):
            if not self._streams:
                commands.append(self._commands.get(timeout=HEARTBEAT if self._sharded else None))
            while True:
                commands.append(self._commands.get_nowait())
        return broadcast_object(commands) if self._sharded else commands

    def run_commands(self, commands: Sequence[Command]) -> bool:
        """Executes commands. Returns whether the thread goes on."""
        accepted, refused = [], []
        for command in commands:
            if isinstance(command, Stop):
                return False
            if isinstance(command, Submit):
                try:
                    self._streams[command.id] = self.engine.submit_all(
                        command.prompts, command.sampling, stop_ids=command.stop_ids, adapter=command.adapter
                    )
                    accepted.append(command.id)
                except UserError as error:
                    refused.append((command.id, [], error))
            elif isinstance(command, Cancel):
                for stream in self._streams.pop(command.id, ()):
                    stream.cancel()
            else:
                self._answer(command)
        if accepted or refused:
            self._in_loop(self._deliver, refused, accepted)
        return True

    def _answer(self, command: Call) -> None:
        answer = self._answers.pop(command.id, None)
        if answer is None or not answer.set_running_or_notify_cancel():
            answer = Future()  # nobody waits
        try:
            answer.set_result(None if command.function is None else command.function(self.engine, *command.args))
        except Exception as error:  # the caller's: the engine goes on
            answer.set_exception(error)

    def run_step(self) -> None:
        """Runs a step, if there are unfinished requests. If it fails, the requests of the step fail."""
        if not self._streams:
            return
        try:
            self.engine.step()
            self._failures = 0
        except Exception as error:
            self._failures += 1
            if self._failures >= FAILURES or not any(s.error for streams in self._streams.values() for s in streams):
                raise
            logger.error("a step of the engine failed: %s", describe_exception(error), exc_info=error)

    def _publish(self) -> None:
        batch = []
        for id, streams in list(self._streams.items()):
            pieces = [(number, piece) for number, stream in enumerate(streams) for piece in stream.ready()]
            error = next((stream.error for stream in streams if stream.error is not None), None)
            if error is not None and not isinstance(error, UserError):
                error = EngineFailure(f"the engine failed: {type(error).__name__}; the server's log has the cause")
            if error is not None or all(stream.finished for stream in streams):
                for stream in self._streams.pop(id):
                    stream.cancel()
            if pieces or error is not None:
                batch.append((id, pieces, error))
        if batch:
            self._in_loop(self._deliver, batch, [])
