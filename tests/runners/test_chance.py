"""What draws from a device's global generator is seen at a run's first step."""

import pytest
import torch

from mixassay.runners.chance import Drawn, nothing_drawn

NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, NO_CUDA])


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_the_first_step_may_not_draw(device: str) -> None:
    x = torch.ones(8, device=device)
    with nothing_drawn(device, 0):
        x.add_(x)
    with pytest.raises(Drawn, match="no run could be repeated"), nothing_drawn(device, 0):
        torch.nn.functional.dropout(x, 0.5, training=True)
    with nothing_drawn(device, 1):
        torch.rand(3, device=device)
