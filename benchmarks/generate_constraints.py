"""Measures the cost of constrained decoding per token: the mask of allowed tokens, and its use on the logits.

Usage: python benchmarks/generate_constraints.py TOKENIZER [--texts N]

TOKENIZER is a tokenizer folder. Texts are drawn at random from the allowed tokens; no model runs. Prints for each
constraint medians of CPU time in microseconds per token, the 99th percentile of the mask, and the time to compile.
"logits" is the use of the mask on the logits; "plain" is greedy decoding without a constraint.
"""

import argparse
import random
import statistics
import time

import torch

from weft.data.tokenizers.tokenizer import Tokenizer
from weft.generation.constraints import Constraint, compile_constraint, trie_of
from weft.generation.sampler import Context, new_generator, process
from weft.generation.settings import Sampling

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 60},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 8},
        "born": {"type": "string", "format": "date"},
    },
    "required": ["name", "age", "tags", "born"],
    "additionalProperties": False,
}
CONSTRAINTS = {
    "any JSON": {"json_schema": True},
    "JSON schema": {"json_schema": PERSON},
    "regex": {"regex": r"[A-Z][a-z ]{20,200}\. [0-9]{4}-[0-9]{2}"},
    "grammar": {"grammar": 'start: term (("+" | "*") term)*\nterm: /[0-9]{1,9}/ | "(" start ")"'},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer")
    parser.add_argument("--texts", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = Tokenizer.load(args.tokenizer)
    start = time.thread_time()
    size = trie_of(tokenizer).size
    print(f"trie of {size:,} tokens: {time.thread_time() - start:.2f} s, once per tokenizer")
    print(f"{'':12}{'compile ms':>12}{'mask us':>10}{'p99 us':>10}{'logits us':>11}{'plain us':>10}{'tokens':>8}")
    for name, settings in CONSTRAINTS.items():
        start = time.thread_time()
        Constraint(tokenizer, compile_constraint(**settings) or "", {tokenizer.eod_id})
        compiled = time.thread_time() - start
        masks, uses, plain, rng = [], [], [], random.Random(1)
        logits = torch.randn(1, size)
        for text in range(args.texts):
            constraint, new = Constraint(tokenizer, compile_constraint(**settings) or "", {tokenizer.eod_id}), []
            context = Context(Sampling(1, **settings), new_generator(text, 0, ()), (), new, None, constraint)
            while len(new) < 100:
                begin = time.thread_time()
                if constraint.advance(new):
                    break
                middle = time.thread_time()
                process(logits, [context])
                uses.append(time.thread_time() - middle)
                masks.append(middle - begin)
                begin = time.thread_time()
                logits.argmax(-1).tolist()
                plain.append(time.thread_time() - begin)
                allowed = constraint.mask(new).nonzero().flatten().tolist()
                token = rng.choice(allowed)
                if token == tokenizer.eod_id:
                    break
                new.append(token)
        cells = [compiled * 1e3, *(1e6 * t for t in (statistics.median(masks), statistics.quantiles(masks, n=100)[98]))]
        cells += [1e6 * statistics.median(uses), 1e6 * statistics.median(plain)]
        print(
            f"{name:12}{cells[0]:12.1f}{cells[1]:10.0f}{cells[2]:10.0f}{cells[3]:11.0f}{cells[4]:10.0f}{len(masks):8}"
        )


if __name__ == "__main__":
    main()
