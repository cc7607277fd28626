"""ResNet-18 in single precision on ImageNet-sized noise, SGD, the way the old examples do it."""

import json
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

BATCH, STEPS, IMAGE = 128, 14, 224


class BasicBlock(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(cout)
        self.shortcut = nn.Sequential()
        if stride != 1 or cin != cout:
            self.shortcut = nn.Sequential(nn.Conv2d(cin, cout, 1, stride=stride, bias=False), nn.BatchNorm2d(cout))

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out)


class ResNet18(nn.Module):
    def __init__(self, num_classes=1000):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(64)
        blocks, cin = [], 64
        for cout, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)):
            blocks.append(BasicBlock(cin, cout, stride))
            cin = cout
        self.blocks = nn.ModuleList(blocks)
        self.fc = nn.Linear(512, num_classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, stride=2, padding=1)
        for block in self.blocks:
            x = block(x)
        return self.fc(x.mean(dim=(2, 3)))


def main():
    device = torch.device("cuda")
    data = TensorDataset(torch.randn(4 * BATCH, 3, IMAGE, IMAGE), torch.randint(0, 1000, (4 * BATCH,)))
    loader = DataLoader(data, batch_size=BATCH, num_workers=2, pin_memory=True, drop_last=True)
    model = ResNet18().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)
    times, running = [], torch.zeros((), device=device)
    while len(times) < STEPS:
        for images, target in loader:
            start = time.perf_counter()
            images, target = images.to(device, non_blocking=True), target.to(device, non_blocking=True)
            optimizer.zero_grad()
            output = model(images)
            loss = F.cross_entropy(output, target)
            loss.backward()
            optimizer.step()
            running += (output.argmax(dim=1) == target).float().mean()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        scheduler.step()
    print("accuracy", running.item() / len(times))
    print(json.dumps({"step_s": statistics.median(times[4:]), "peak": torch.cuda.max_memory_allocated()}))


if __name__ == "__main__":
    main()
