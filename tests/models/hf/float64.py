"""Run code that casts to float32 inside (norms, softmax, rotary angles, routers) in float64 throughout."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Float64(TorchFunctionMode):
    """Every request for float32 becomes float64, and a float32 result is an error: the judge must be exact to 1e-15."""

    def __enter__(self) -> Float64:
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_default_dtype(self._default)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].to(torch.float64)
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        out = func(*args, **{key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()})
        if isinstance(out, torch.Tensor) and out.dtype == torch.float32:
            raise AssertionError(f"{func} computed in float32 inside the float64 judge")
        return out
