"""Muon (Jordan et al., 2024) for stacked matrices, AdamW for the others."""

import torch


def orthogonal(gradient, steps=5):
    """Nearly the nearest semi-orthogonal matrix, of each of a stack; by Newton-Schulz with the quintic of the paper."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = gradient.to(torch.bfloat16 if gradient.is_cuda else torch.float32)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if tall else x).to(gradient.dtype)


class Muon(torch.optim.Optimizer):
    def __init__(self, parameters, lr, momentum=0.95, weight_decay=0.1):
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                momentum = state.setdefault("momentum", torch.zeros_like(weight))
                momentum.lerp_(weight.grad, 1 - group["momentum"])
                update = orthogonal(weight.grad.lerp(momentum, group["momentum"]))
                rows, columns = weight.shape[-2:]
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(update, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)


def optimizers_of(model, matrix_lr, other_lr):
    matrices = [weight for name, weight in model.named_parameters() if weight.ndim == 3]
    others = [weight for name, weight in model.named_parameters() if weight.ndim < 3]
    return [Muon(matrices, matrix_lr), torch.optim.AdamW(others, other_lr, betas=(0.9, 0.95), weight_decay=0.0)]
