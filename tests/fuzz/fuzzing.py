"""Seeded mutations of configs, JSON and files, and a limit of time for what reads them."""

import json
import random
import signal
from contextlib import contextmanager
from pathlib import Path

# Values that readers of files tend to forget.
ODD = [
    *(None, True, False, 0, -1, 1, 2, 3, 7, 64, 2**31, -(2**63), 10**30, 0.0, -0.5, 1e-30, 1e308, float("nan")),
    *("", " ", "0", "auto", "nan", "null", "../../etc/passwd", "/etc/passwd", "a:b", "os:system", "subprocess:Popen"),
    *(
        "\x00",
        "é\u2028\ud800",
        "${HOME}",
        "${NOT_THERE}",
        "x" * 5000,
        "*",
        "[",
        "{",
        "step-00000001",
        "~/x",
        "file://x",
    ),
    *([], {}, [[]], [None], {"type": "x"}, {"": ""}, {"a": {"b": {"c": 1}}}, [1, "a"], {"type": None}, [{"store": 1}]),
]


@contextmanager
def within(seconds: int):
    """Fails if the block takes longer: what reads a damaged file must not hang."""

    def late(*_):
        raise TimeoutError(f"still busy after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def places(tree, at=()):
    """The paths of all values of a tree of JSON."""
    yield at
    if isinstance(tree, dict | list):
        for key in tree if isinstance(tree, dict) else range(len(tree)):
            yield from places(tree[key], (*at, key))


def mutated_tree(rng: random.Random, tree):
    """A copy of a tree with 1 to 3 values replaced, removed, renamed or exchanged."""
    tree = json.loads(json.dumps(tree))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        found = [place for place in places(tree) if place]
        if not found:
            break
        *above, key = rng.choice(found)
        holder = tree
        for part in above:
            holder = holder[part]
        kind = rng.randrange(6)
        if kind < 3:
            holder[key] = json.loads(json.dumps(rng.choice(ODD)))
        elif kind == 3:
            del holder[key]
        elif kind == 4 and isinstance(holder, dict):
            holder[rng.choice((f"{key}x", str(key)[:-1], "type", "from", ""))] = holder.pop(key)
        elif isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
            holder[key] = rng.choice(
                (holder[key] * 2, -holder[key], holder[key] + 1, holder[key] / 2, str(holder[key]))
            )
        else:
            *other, last = rng.choice(found)
            source = tree
            try:
                for part in (*other, last):
                    source = source[part]
                holder[key] = json.loads(json.dumps(source))
            except (KeyError, IndexError, TypeError):
                pass
    return tree


def mutated_bytes(rng: random.Random, data: bytes) -> bytes:
    """Bytes with flipped bits, a range removed, repeated, zeroed or replaced, or an end cut off."""
    data = bytearray(data)
    at = rng.randrange(len(data) + 1)
    size = rng.choice((1, 2, 8, 64, 1000))
    kind = rng.randrange(7)
    if kind == 0 and data:
        data[at % len(data)] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del data[at:]
    elif kind == 2:
        del data[at : at + size]
    elif kind == 3:
        data[at:at] = data[at : at + size] or b"\0"
    elif kind == 4:
        data[at : at + size] = bytes(len(data[at : at + size]))
    elif kind == 5:
        data[at : at + size] = rng.randbytes(size)
    else:
        data += rng.randbytes(size)
    return bytes(data)


def mutate_file(rng: random.Random, path: Path) -> str:
    """Damages a file, or deletes it, or puts a folder or a link in its place. Returns what was done."""
    kind = rng.randrange(12)
    if kind == 0:
        path.unlink()
        return f"{path.name} is deleted"
    if kind == 1:
        path.unlink()
        path.mkdir()
        return f"{path.name} is a folder"
    if kind == 2:
        path.unlink()
        path.symlink_to(rng.choice(("/etc/hostname", "nowhere", path.name)))
        return f"{path.name} is a link"
    if path.suffix == ".json" and kind < 9:
        tree = json.loads(path.read_bytes())
        path.write_text(json.dumps(mutated_tree(rng, tree)))
        return f"{path.name} has other values"
    path.write_bytes(mutated_bytes(rng, path.read_bytes()))
    return f"{path.name} has other bytes"
