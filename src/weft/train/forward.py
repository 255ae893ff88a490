"""Where `forward_of` was before the evaluation needed it as well."""

from weft.models.forward import forward_of as forward_of
