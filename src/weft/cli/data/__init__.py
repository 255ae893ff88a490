"""`weft data`: raw text to a tokenizer and to token stores, and work on stores. One file a sub-verb."""

HELP = "train a tokenizer, pack text into token stores, work on stores"
GROUP = "data"
GROUPS = ("make", "look", "work")  # of its sub-verbs
