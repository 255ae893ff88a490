"""`weft data import-tokenizer`: converts a tokenizer of another library."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.data.tokenizers.import_tokenizer import Imported
    from weft.observe.console import Console

HELP = "import a SentencePiece model or tiktoken ranks"
GROUP = "make"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "SOURCE is a SentencePiece .model (BPE or unigram), a tiktoken rank file, a tokenizer.json or its folder. The "
        "ids are compared with those of the original library. The end-of-document token is --eod, or the token that "
        "a SentencePiece model or a tokenizer's folder defines."
    )
    parser.add_argument("source", metavar="SOURCE", help="the tokenizer to import")
    parser.add_argument("--out", required=True, metavar="DIR", help="the tokenizer's folder")
    parser.add_argument(
        "--eod",
        metavar="TOKEN",
        help="the end-of-document token; it must be in the vocabulary, or be given with --special",
    )
    parser.add_argument(
        "--pattern",
        metavar="NAME",
        help="for tiktoken: the pattern that splits text into words: gpt2, cl100k, o200k, llama3, qwen2, or a regex",
    )
    parser.add_argument(
        "--special", action="append", default=[], metavar="TOKEN[=ID]", help="adds a special token; can be repeated"
    )
    parser.add_argument(
        "--check", nargs="+", default=[], metavar="FILE", help="more text files on which ids are compared"
    )
    parser.add_argument("--allow-differences", action="store_true", help="write the tokenizer even if ids differ")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing tokenizer")


def run(args: argparse.Namespace) -> int:
    import json

    from weft.data.output_folder import TOKENIZER, check_out
    from weft.data.tokenizers.exactness import make_recipe
    from weft.data.tokenizers.train import write_folder
    from weft.errors import UserError
    from weft.files import read_json
    from weft.headers import read_tokenizer_header
    from weft.observe.console import Console

    console, source, out = Console(), _find_file(Path(args.source)), Path(args.out)
    check_out(out, TOKENIZER, [source, *map(Path, args.check)], overwrite=args.overwrite, new=True)
    imported = _convert(source, args)
    eod = args.eod or imported.eod
    if eod is None:
        raise UserError("has no end-of-document token; set it with --eod TOKEN", source)
    compared = _compare(imported, source, args, console)
    settings, extra_files = None, []
    if source.suffix == ".json":
        config, template = source.parent / "tokenizer_config.json", source.parent / "chat_template.jinja"
        settings, extra_files = read_json(config) if config.exists() else None, [template] if template.exists() else []
    known = {token["content"] for token in imported.content["added_tokens"]}
    vocabulary = imported.content["model"]["vocab"]
    known |= vocabulary.keys() if isinstance(vocabulary, dict) else {piece for piece, _ in vocabulary}
    if eod not in known:
        raise UserError(f"--eod {eod}: not in the vocabulary; add it with --special {eod}", source)
    content = json.dumps(imported.content, ensure_ascii=False, indent=1)
    write_folder(content, eod, out, settings=settings, extra_files=extra_files)
    header = read_tokenizer_header(out)
    tokens = f"{header.vocab_size:,} tokens, from {imported.kind}"
    console.result(f"{out}: {tokens}; documents end with {eod} ({header.eod_id}){compared}")
    recipe = make_recipe(read_json(out / "tokenizer.json"))
    if isinstance(recipe, str):
        console.line(f"`weft data pack` will use the tokenizers library, which is slower: {recipe}")
    return 0


def _compare(imported: Imported, source: Path, args: argparse.Namespace, console: Console) -> str:
    """Compares the ids of an imported tokenizer with the ids of the original library. Returns the result as text.

    If ids differ, raises UserError or, with --allow-differences, warns.
    """
    from weft.data.tokenizers.import_tokenizer import EDGE_CASES, TEST_TEXTS, compare_ids
    from weft.errors import UserError

    library = imported.library
    texts = [*TEST_TEXTS, "\n".join(TEST_TEXTS), *(piece for file in args.check for piece in _read_pieces(Path(file)))]
    differing, compared = compare_ids(imported, texts)
    if differing:
        what = (
            f"ids differ from those of {library} on {len(differing)} of {compared:,} texts, "
            f"such as {differing[0][:60]!r}"
        )
        if not args.allow_differences:
            raise UserError(f"{what}; nothing was written; use --allow-differences to write it anyway", source)
        console.warning(what)
    if "unigram" in imported.kind:
        console.warning(
            f"ids can differ from those of {library} if a character occurs 3 times or more in a row ('000', '...'): "
            "a unigram model can split such runs in several equally probable ways; compare the ids on your texts with "
            "--check FILE"
        )
    edge_cases, _ = compare_ids(imported, EDGE_CASES)
    if edge_cases:
        examples = ", ".join(ascii(text[:12]) for text in edge_cases)
        console.warning(
            f"ids can differ from those of {library} on texts such as {examples}; compare the ids on your texts with "
            "--check FILE"
        )
    return f"; ids equal those of {library} on {compared - len(differing):,} of {compared:,} texts" if compared else ""


def _convert(source: Path, args: argparse.Namespace) -> Imported:
    """Converts a tokenizer.json or a SentencePiece .model. Reads any other file as tiktoken ranks."""
    from weft.data.tokenizers.import_tokenizer import from_folder, from_sentencepiece, from_tiktoken
    from weft.errors import UserError

    special = dict(map(_parse_special, args.special))
    if source.suffix == ".json":
        return from_folder(source, special)
    if source.suffix == ".model":
        if special:
            raise UserError("--special: import the model first, then import the resulting folder with --special")
        return from_sentencepiece(source)
    if args.pattern is None:
        what = "a rank file does not define how text is split; give --pattern (gpt2, cl100k, o200k, ... or a regex)"
        raise UserError(what, source)
    return from_tiktoken(source, args.pattern, special)


def _find_file(path: Path) -> Path:
    """Returns the tokenizer's file: `path`, or a file in the folder `path`. Raises UserError if there is none."""
    from weft.errors import UserError

    if path.is_dir():
        candidates = [path / "tokenizer.json", *sorted(path.glob("*.model")), *sorted(path.glob("*.tiktoken"))]
        path = next((file for file in candidates if file.exists()), path / "tokenizer.json")
    if not path.exists():
        raise UserError("no such file; name a SentencePiece .model, a tiktoken rank file or a tokenizer.json", path)
    return path


def _parse_special(text: str) -> tuple[str, int | None]:
    """Parses TOKEN=ID to (token, id), and TOKEN to (token, None)."""
    token, equals, id = text.rpartition("=")
    return (token, int(id)) if equals and token and id.isdecimal() else (text, None)


def _read_pieces(file: Path) -> list[str]:
    """Returns the content of a text file in pieces of 10,000 characters."""
    from weft.errors import UserError

    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}; --check needs text files", file) from None
    except UnicodeDecodeError:
        raise UserError("not UTF-8; --check needs UTF-8 text files", file) from None
    return [text[i : i + 10_000] for i in range(0, len(text), 10_000)]
