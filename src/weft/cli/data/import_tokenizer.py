"""`weft data import-tokenizer`: another library's tokenizer as a folder that Weft reads."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.data.tokenizers.import_tokenizer import Imported

HELP = "use a SentencePiece model or tiktoken ranks"
GROUP = "make"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "SOURCE: a SentencePiece .model (BPE or unigram), a tiktoken rank file, a tokenizer.json or its folder. The "
        "result's ids are compared with the original library's. The end-of-document token is the one that a "
        "SentencePiece model or a tokenizer's folder states; else --eod names it."
    )
    parser.add_argument("source", metavar="SOURCE", help="the tokenizer to import")
    parser.add_argument("--out", required=True, metavar="DIR", help="the tokenizer's folder")
    parser.add_argument("--eod", metavar="TOKEN", help="the end-of-document token: of the vocabulary, or a --special")
    parser.add_argument(
        "--pattern", metavar="NAME", help="how tiktoken cuts text: gpt2, cl100k, o200k, llama3, qwen2, or a regex"
    )
    parser.add_argument(
        "--special", action="append", default=[], metavar="TOKEN[=ID]", help="add a special token; may be repeated"
    )
    parser.add_argument("--check", nargs="+", default=[], metavar="FILE", help="texts to compare the ids on as well")
    parser.add_argument("--allow-differences", action="store_true", help="write it even where ids differ")
    parser.add_argument("--overwrite", action="store_true", help="replace a tokenizer that is there")


def run(args: argparse.Namespace) -> int:
    import json

    from weft.data.output_folder import TOKENIZER, check_out, exists_already
    from weft.data.tokenizers.exactness import recipe_of
    from weft.data.tokenizers.import_tokenizer import NASTY, ODD, differences
    from weft.data.tokenizers.train import write_folder
    from weft.errors import UserError
    from weft.files import read_json
    from weft.headers import read_tokenizer_header
    from weft.observe.console import Console

    console, source, out = Console(), _file(Path(args.source)), Path(args.out)
    check_out(out, TOKENIZER, [source, *map(Path, args.check)], overwrite=args.overwrite)
    if os.path.lexists(out) and not args.overwrite:
        raise exists_already(out, TOKENIZER)
    imported = _imported(source, args)
    eod = args.eod or imported.eod
    if eod is None:
        raise UserError("states no end-of-document token; name it: --eod TOKEN", source)
    library = imported.library
    texts = [*NASTY, "\n".join(NASTY), *(piece for file in args.check for piece in _pieces(Path(file)))]
    differing, compared = differences(imported, texts)
    if differing:
        what = f"ids differ from {library}'s on {len(differing)} of {compared:,} texts, such as {differing[0][:60]!r}"
        if not args.allow_differences:
            raise UserError(f"{what}; nothing was written, --allow-differences writes it all the same", source)
        console.warning(what)
    if "unigram" in imported.kind:
        console.warning(
            f"ids may differ from {library}'s where a character stands three times or more in a row ('000', '....'), "
            "which a unigram model can cut in several equally good ways; --check FILE compares them on texts of yours"
        )
    odd, _ = differences(imported, ODD)
    if odd:
        some = ", ".join(ascii(text[:12]) for text in odd)
        console.warning(f"ids may differ from {library}'s on {some} and the like")
    settings, beside = None, []
    if source.suffix == ".json":
        config, template = source.parent / "tokenizer_config.json", source.parent / "chat_template.jinja"
        settings, beside = (read_json(config) if config.exists() else None), [template] if template.exists() else []
    known = {token["content"] for token in imported.content["added_tokens"]}
    vocabulary = imported.content["model"]["vocab"]
    known |= vocabulary.keys() if isinstance(vocabulary, dict) else {piece for piece, _ in vocabulary}
    if eod not in known:
        raise UserError(f"--eod {eod}: not in its vocabulary; --special {eod} adds it", source)
    write_folder(json.dumps(imported.content, ensure_ascii=False, indent=1), eod, out, settings=settings, beside=beside)
    header = read_tokenizer_header(out)
    same = f"; ids as {library}'s on {compared - len(differing):,} of {compared:,} texts" if compared else ""
    console.result(
        f"{out}: {header.vocab_size:,} tokens, from {imported.kind}; documents end with {eod} ({header.eod_id}){same}"
    )
    recipe = recipe_of(read_json(out / "tokenizer.json"))
    if isinstance(recipe, str):
        console.line(f"packing goes through the tokenizers library, which is slower: {recipe}")
    return 0


def _imported(source: Path, args: argparse.Namespace) -> Imported:
    """The tokenizer, by the kind of its file."""
    from weft.data.tokenizers.import_tokenizer import from_folder, from_sentencepiece, from_tiktoken
    from weft.errors import UserError

    special = dict(map(_special, args.special))
    if source.suffix == ".json":
        return from_folder(source, special)
    if source.suffix == ".model":
        if special:
            raise UserError("--special: import the model first, then add special tokens to the folder that it gave")
        return from_sentencepiece(source)
    if args.pattern is None:
        what = "a rank file does not say how text is cut: name its --pattern (gpt2, cl100k, o200k, ... or a regex)"
        raise UserError(what, source)
    return from_tiktoken(source, args.pattern, special)


def _file(path: Path) -> Path:
    """The tokenizer's file."""
    from weft.errors import UserError

    if path.is_dir():
        there = [path / "tokenizer.json", *sorted(path.glob("*.model")), *sorted(path.glob("*.tiktoken"))]
        path = next((file for file in there if file.exists()), path / "tokenizer.json")
    if not path.exists():
        raise UserError("no such file; name a .model, a rank file or a tokenizer.json", path)
    return path


def _special(text: str) -> tuple[str, int | None]:
    """TOKEN or TOKEN=ID."""
    token, equals, id = text.rpartition("=")
    return (token, int(id)) if equals and token and id.isdecimal() else (text, None)


def _pieces(file: Path) -> list[str]:
    """A text file in pieces of some thousands of characters."""
    from weft.errors import UserError

    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}; --check names text files", file) from None
    except UnicodeDecodeError:
        raise UserError("not UTF-8; --check names text files", file) from None
    return [text[i : i + 10_000] for i in range(0, len(text), 10_000)]
