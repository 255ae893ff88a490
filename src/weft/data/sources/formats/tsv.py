"""The source format of TSV files: CSV with tabs as delimiters."""

from weft.data.sources.formats import csv


class Format(csv.Format):
    suffixes = (".tsv",)
    delimiter = "\t"
