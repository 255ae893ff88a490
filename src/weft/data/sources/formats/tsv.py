"""TSV files: CSV with tabs."""

from weft.data.sources.formats import csv


class Format(csv.Format):
    suffixes = (".tsv",)
    delimiter = "\t"
