"""The transformer of `benchmarks.gpu` in PyTorch.

It uses autocast, `torch.compile`, fused Adam, and `GradScaler` in float16. Its
layers and sizes are those of `gpu_models.transformer`.
"""

import torch
from torch import nn
from torch.nn import functional

from benchmarks import gpu_models

_DTYPES = {"mixed_float16": torch.float16, "mixed_bfloat16": torch.bfloat16}


class Block(nn.Module):
    """Attention and two dense layers, each after a normalisation."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.before_hidden = nn.LayerNorm(width)
        self.hidden = nn.Linear(width, 4 * width)
        self.back = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of the shape of `x`, (rows, length, width)."""
        rows, length, width = x.shape
        joined = self.query_key_value(self.before_attention(x))
        apart = joined.view(rows, length, 3, self._heads, -1)
        query_key_value = apart.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*query_key_value)
        mixed = mixed.transpose(1, 2).reshape(rows, length, width)
        x = x + self.output(mixed)
        hidden = functional.gelu(self.hidden(self.before_hidden(x)))
        return x + self.back(hidden)


class Session:
    """The model as a row; see `gpu_worker.Session`."""

    def __init__(self, precision: str, tiny: bool) -> None:
        torch.manual_seed(0)
        task = gpu_models.task("transformer", tiny)
        width, vocabulary = task.sizes["width"], task.sizes["vocabulary"]
        blocks = [
            Block(width, task.sizes["heads"])
            for _ in range(task.sizes["blocks"])
        ]
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        net = nn.Sequential(
            nn.Embedding(vocabulary, width),
            *blocks,
            nn.LayerNorm(width),
            nn.Linear(width, vocabulary),
        ).to(self._device)
        self.weights = sum(each.numel() for each in net.parameters())
        # The tiny model must run without a compiler.
        self._net = net if tiny else torch.compile(net)
        self._adam = torch.optim.Adam(net.parameters(), 1e-4, fused=not tiny)
        self._dtype = _DTYPES[precision]
        self._scaler = torch.amp.GradScaler(
            self._device, enabled=self._dtype is torch.float16
        )
        x, y = (torch.from_numpy(each) for each in task.batch_of_all())
        self._x, self._y = x.to(self._device), y.long().to(self._device)

    def train(self, steps: int) -> float:
        """Runs steps; returns the last loss."""
        for _ in range(steps):
            with torch.autocast(self._device, self._dtype):
                logits = self._net(self._x).float()
                loss = functional.cross_entropy(
                    logits.flatten(0, 1), self._y.flatten()
                )
            self._scaler.scale(loss).backward()
            self._scaler.step(self._adam)
            self._scaler.update()
            self._adam.zero_grad()
        # `item` waits for the device.
        return loss.item()

    def peak(self) -> int | None:
        """Returns the most bytes that were in use, `None` without a GPU."""
        if self._device == "cpu":
            return None
        return torch.cuda.max_memory_allocated()
