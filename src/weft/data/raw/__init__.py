"""Packs raw data of a run into cached token stores."""
