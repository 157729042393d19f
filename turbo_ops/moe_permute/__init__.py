from turbo_ops.moe_permute.op import (
    Permutation,
    moe_permute,
    moe_permute_combine,
    moe_permute_dot,
    moe_permute_gather,
    moe_permute_sort,
    moe_unpermute,
    permute_rows,
    rows_of,
    unpermute_rows,
)

__all__ = [
    "Permutation",
    "moe_permute",
    "moe_permute_combine",
    "moe_permute_dot",
    "moe_permute_gather",
    "moe_permute_sort",
    "moe_unpermute",
    "permute_rows",
    "rows_of",
    "unpermute_rows",
]
