"""What a measurement was made on: stands in every file of results."""

from __future__ import annotations

import torch


def machine() -> dict[str, str]:
    try:
        import triton

        version = triton.__version__
    except ImportError:
        version = "none"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"gpu": gpu, "torch": torch.__version__, "triton": version}


if __name__ == "__main__":
    print(machine())
