"""ResNet-50, channels-last, bf16 autocast, SGD with momentum and a cosine schedule."""

import json
import statistics
import time

import torch
import torch.nn as nn

BATCH, IMAGE, STEPS = 192, 224, 14


class Bottleneck(nn.Module):
    def __init__(self, inside, width, stride=1):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.down = None
        if stride != 1 or inside != 4 * width:
            conv = nn.Conv2d(inside, 4 * width, 1, stride, bias=False)
            self.down = nn.Sequential(conv, nn.BatchNorm2d(4 * width))

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return self.relu(out + (x if self.down is None else self.down(x)))


class ResNet50(nn.Module):
    def __init__(self, classes=1000):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        stages, inside = [], 64
        for index, (width, depth) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)]):
            for block in range(depth):
                stages.append(Bottleneck(inside, width, 2 if block == 0 and index > 0 else 1))
                inside = 4 * width
        self.layers = nn.Sequential(*stages)
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(inside, classes)

    def forward(self, x):
        return self.fc(torch.flatten(self.pool(self.layers(self.stem(x))), 1))


def main():
    device = "cuda"
    model = ResNet50().to(device, memory_format=torch.channels_last)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    images = torch.randn(BATCH, 3, IMAGE, IMAGE, device=device).to(memory_format=torch.channels_last)
    target = torch.randint(0, 1000, (BATCH,), device=device)
    model.train()
    times = []
    for step in range(STEPS):
        start = time.perf_counter()
        with torch.autocast(device_type="cuda", dtype=torch.bfloat16):
            loss = criterion(model(images), target)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        scheduler.step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        if step % 5 == 0:
            print(f"[{step}/{STEPS}] loss {loss.item():.3f}")
    print(json.dumps({"step_s": statistics.median(times[4:]), "peak": torch.cuda.max_memory_allocated()}))


if __name__ == "__main__":
    main()
