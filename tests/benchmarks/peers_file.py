"""Peers for tests: one that is right, one that is wrong, and ones that fail or lack parts."""

import torch
import torch.nn.functional as F

calls = []


class Peer:
    name = "?"

    def setup(self, cfg, w_up, w_down):
        assert not w_up.requires_grad
        print("a peer that prints")
        calls.append((self.name, cfg))
        self.k = cfg[4]
        # its own layout: gate, up and down apart
        gate, up = w_up.chunk(2, 1)
        self.params = [t.clone().requires_grad_() for t in (gate, up, w_down)]

    def fwd(self, x, logits):
        gate, up, down = (p.float() for p in self.params)
        kth = logits.topk(self.k, -1).values[:, -1:]
        weights = torch.softmax(logits.masked_fill(logits < kth, -torch.inf), -1)
        act = F.silu(torch.einsum("td,efd->tef", x.float(), gate)) * torch.einsum("td,efd->tef", x.float(), up)
        return torch.einsum("tef,edf,te->td", act, down, weights).to(x.dtype)

    def canon(self, grads):
        return torch.cat(grads[:2], 1), grads[2]


class Right(Peer):
    name = "right"


class ForwardOnly(Peer):
    name = "forward only"
    has_bwd = False


class Wrong(Peer):
    name = "wrong"

    def canon(self, grads):
        return torch.cat(grads[1::-1], 1), grads[2]


class Broken(Peer):
    name = "broken"

    def setup(self, cfg, w_up, w_down):
        raise RuntimeError("no such chip")


class Later(Peer):
    """Fails once it has been timed a few times."""

    name = "later"
    runs = 0

    def fwd(self, x, logits):
        Later.runs += 1
        if Later.runs > 12:
            raise ValueError("worn out")
        return super().fwd(x, logits)


class Products:
    """Only products, no block."""

    name = "products"

    def setup(self, cfg, w_up, w_down):
        self.w = w_up

    def time_fwd(self, i):
        return self.w @ self.w.mT

    def time_fb(self, i):
        return [self.w @ self.w.mT for _ in range(3)]
