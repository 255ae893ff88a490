"""The decoder's tensors from the tensors of Hugging Face files, held in memory: a reference for reading from files."""

from dataclasses import replace

import torch

from weft.models.huggingface_weights import tensor_mapping


def apply(transform, stored):
    """Weft's tensor, or one expert's, from the stored tensor."""
    if transform is None:
        return stored
    if transform.stacked:
        return torch.stack([apply(replace(transform, stacked=False), one) for one in stored])
    if transform.transposed:
        stored = stored.T
    if not transform.sizes:
        return stored
    rest = stored.shape[1:]
    parts = stored.reshape(transform.groups, -1, *rest).split(transform.sizes, dim=1)
    return parts[transform.part].reshape(-1, *rest)


def convert(section, stored):
    """A decoder's state dict from the tensors of Hugging Face files, by their names."""
    found, experts = {}, set()
    for name, hf_name, transform in tensor_mapping(section):
        found.setdefault(name, []).append(apply(transform, stored[hf_name]))
        if transform is not None and transform.expert is not None:
            experts.add(name)
    return {name: torch.stack(parts) if name in experts else parts[0] for name, parts in found.items()}
