"""`weft data`: raw text to a tokenizer and to token stores, and work on stores. One file a sub-verb."""

HELP = "train a tokenizer, pack text into token stores, work on stores"

# Sub-verb -> its module (with HELP, add_arguments, run) and its line in `weft data --help`, by group.
VERBS = {
    "make": {
        "train-tokenizer": ("weft.cli.data.train_tokenizer", "train a byte-level BPE on text"),
        "import-tokenizer": ("weft.cli.data.import_tokenizer", "use a SentencePiece model or tiktoken ranks"),
        "index": ("weft.cli.data.index", "byte offsets of a JSON-lines file's documents, for random access"),
        "pack": ("weft.cli.data.pack", "tokenize documents into a token store"),
    },
    "look": {
        "inspect": ("weft.cli.data.inspect", "counts, lengths and decoded samples of a token store"),
        "verify": ("weft.cli.data.verify", "read every byte of token stores and say what is wrong where"),
    },
    "work": {
        "merge": ("weft.cli.data.merge", "put stores end to end, shards among them"),
        "convert": ("weft.cli.data.convert", "stores of Megatron, nanoGPT, Modalities, LitData, MDS"),
        "shuffle": ("weft.cli.data.shuffle", "documents in random order"),
        "split": ("weft.cli.data.split", "parts for training and validation; copies stay together"),
        "sample": ("weft.cli.data.sample", "some documents, drawn at random"),
        "filter": ("weft.cli.data.filter", "documents by length, or by a function of yours"),
        "dedup": ("weft.cli.data.dedup", "documents without copies, exact or near"),
    },
}
