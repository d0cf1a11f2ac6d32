"""Train your own model on your own data: FedAvg and MAPO with ten clients, and the bytes that each sends.

Run: python examples/bring_your_model.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import thinwire as tw

inputs, targets = load_digits(return_X_y=True)
inputs, targets = torch.tensor(inputs, dtype=torch.float32) / 16, torch.tensor(targets)
test = (inputs[1500:], targets[1500:])
clients = [(inputs[i:1500:10], targets[i:1500:10]) for i in range(10)]  # one pair of tensors per client

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

for name, method in {
    "fedavg": tw.Method(),
    "mapo": tw.methods.mapo(redraw_every=10),
}.items():
    run = tw.simulate(model, clients, method, rounds=20, cohort=5, test=test, eval_every=20)
    print(f"{name}: accuracy {run.accuracy:.3f}, up {run.bytes_up:,} B, down {run.bytes_down + run.bytes_catchup:,} B")

trained = run.model()  # an nn.Module with the final weights
print(int((trained(test[0]).argmax(1) == test[1]).sum()), "of", len(test[1]), "correct")
