"""What this machine can give to a sweep: cores, and an accelerator or none. Nothing here imports torch."""

import os
from pathlib import Path

DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""What a machine with a CUDA or ROCm device has; in WSL it is the second."""


def cores() -> int:
    """Cores that this process may use: of its affinity mask, and no more than its control group's quota."""
    mask = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return mask
    return mask if quota == "max" else max(1, min(mask, int(quota) // int(period)))


def accelerator_possible() -> bool:
    """False where there is surely no accelerator; only torch can tell whether one that is there can be used."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not hidden and any(Path(driver).exists() for driver in DRIVERS)
