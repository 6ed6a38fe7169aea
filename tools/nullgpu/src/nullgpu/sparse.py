"""Sparse tensors of the null GPU, with values: they are made of dense ones, whose memory the CPU shares.

An operation on them is computed on the CPU first, because how many numbers its result has depends on values.
"""

import torch

SPARSE = {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}
BY_ROWS = {torch.sparse_csr, torch.sparse_bsr}

ONLY_PARTS = {
    *("_sparse_coo_tensor_with_dims", "_sparse_coo_tensor_with_dims_and_tensors", "_sparse_compressed_tensor_unsafe"),
    *("_indices", "_values", "indices", "values", "crow_indices", "col_indices", "ccol_indices", "row_indices"),
    *("_nnz", "_dimI", "_dimV", "sparse_dim", "dense_dim", "is_coalesced", "_coalesced_", "detach", "sym_size"),
}
"""operations that put a tensor together from dense ones, or take one of them"""
MAKE_SPARSE = {"_to_sparse", "_to_sparse_csr", "_to_sparse_csc", "_to_sparse_bsr", "_to_sparse_bsc"}
CHECK_PARTS = {"_validate_sparse_coo_tensor_args", "_validate_sparse_compressed_tensor_args"}
"""operations that read values of dense tensors"""


def is_sparse(value: object) -> bool:
    """Whether a value is a sparse tensor, in any layout."""
    return isinstance(value, torch.Tensor) and value.layout in SPARSE


def concerns(name: str, values: list) -> bool:
    """Whether an operation with these arguments computes with sparse tensors, or moves one from or to a GPU."""
    return name in MAKE_SPARSE | CHECK_PARTS or (name not in ONLY_PARTS and any(map(is_sparse, values)))


def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the dense tensors of a sparse one: its indices, and its values as the last."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in BY_ROWS:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]


def of_parts(like: torch.Tensor, made: list[torch.Tensor]) -> torch.Tensor:
    """Return a sparse tensor like another one, of these dense ones, without a copy."""
    if like.layout is torch.sparse_coo:
        return torch.sparse_coo_tensor(*made, like.shape, is_coalesced=like.is_coalesced(), check_invariants=False)
    return torch.sparse_compressed_tensor(*made, like.shape, layout=like.layout, check_invariants=False)


def overwrite(tensor: torch.Tensor, computed: torch.Tensor) -> None:
    """Let a sparse tensor of a GPU be what an operation in place has made of it; both have the same layout.

    Args:
        computed: on the GPU, too.
    """
    if tensor.layout is torch.sparse_coo:
        tensor.copy_(computed)
        tensor._coalesced_(computed.is_coalesced())
        return
    for own, new in zip(parts(tensor), parts(computed), strict=True):
        own.copy_(new)
