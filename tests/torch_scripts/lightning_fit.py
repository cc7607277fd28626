"""Trainer of Lightning with automatic mixed precision: an MLP-Mixer-like stack of wide layers."""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):
    """Eight residual blocks, and the mean square of their result."""

    def __init__(self) -> None:
        super().__init__()
        blocks = nn.Sequential(nn.LayerNorm(2048), nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048))
        self.blocks = nn.ModuleList(nn.Sequential(*blocks) for _ in range(8))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        x = batch[0]
        for block in self.blocks:
            x = x + block(x)
        loss = x.square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


trainer = lightning.Trainer(
    accelerator="gpu", devices=1, precision="bf16-mixed", max_steps=4, logger=False, enable_checkpointing=False
)
trainer.fit(Regression(), DataLoader(TensorDataset(torch.randn(8192, 2048)), batch_size=4096))
