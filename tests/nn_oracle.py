"""The recurrent layers token by token, from their parameters alone, in the equations of their papers."""

import torch
from torch.nn.functional import logsigmoid, silu, softplus


def rms(x):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def unit(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


class Window:
    """A short convolution: the last inputs of one sequence, oldest first."""

    def __init__(self, layer, name, inputs):
        module = getattr(layer, name)
        self.weight, self.bias, self.inputs = module.weight[:, 0], module.bias, list(inputs)

    def __call__(self, x):
        self.inputs.append(x)
        y = sum(w * x for w, x in zip(self.weight.unbind(1), self.inputs, strict=True))
        self.inputs.pop(0)
        return silu(y if self.bias is None else y + self.bias)


def plain(x):
    return x


def gla(layer, x, s, windows):
    heads, key_dim, value_dim = s.shape
    conv_q, conv_k, conv_v = windows or (plain, plain, plain)
    q = conv_q(layer.q_proj.weight @ x).view(heads, key_dim)
    k = conv_k(layer.k_proj.weight @ x).view(heads, key_dim)
    v = conv_v(layer.v_proj.weight @ x).view(heads, value_dim)
    first, second = layer.gk_proj
    g = logsigmoid(second.weight @ (first.weight @ x) + second.bias).view(heads, key_dim) / 16
    s = g.exp()[:, :, None] * s + k[:, :, None] * v[:, None, :]
    o = torch.stack([q[h] @ s[h] for h in range(heads)]) / key_dim**0.5
    o = rms(o) * layer.g_norm_swish_gate.weight * silu(layer.g_proj.weight @ x).view(heads, value_dim)
    return layer.o_proj.weight @ o.flatten(), s


def gated_delta_net(layer, x, s, windows):
    heads, key_dim, value_dim = s.shape
    conv_q, conv_k, conv_v = windows
    q = unit(conv_q(layer.q_proj.weight @ x).view(-1, key_dim)) / key_dim**0.5
    k = unit(conv_k(layer.k_proj.weight @ x).view(-1, key_dim))
    v = conv_v(layer.v_proj.weight @ x).view(heads, value_dim)
    decay = (-layer.A_log.exp() * softplus(layer.a_proj.weight @ x + layer.dt_bias)).exp()
    beta = (layer.b_proj.weight @ x).sigmoid()
    new, out = [], []
    for h in range(heads):
        shared = h // (heads // len(q))
        old = decay[h] * s[h]
        new.append(old + torch.outer(k[shared], beta[h] * (v[h] - k[shared] @ old)))
        out.append(q[shared] @ new[-1])
    o = rms(torch.stack(out)) * layer.o_norm.weight * silu(layer.g_proj.weight @ x).view(heads, value_dim)
    return layer.o_proj.weight @ o.flatten(), torch.stack(new)


def mamba2(layer, x, s, windows):
    heads, states, channels = s.shape
    inner, groups = heads * channels, layer.n_groups
    projected = layer.in_proj.weight @ x
    z, mixed, a = projected[:inner], projected[inner:-heads], projected[-heads:]
    mixed = windows[0](mixed)
    u, b, c = mixed[:inner], mixed[inner : inner + groups * states], mixed[inner + groups * states :]
    u, b, c = u.view(heads, channels), b.view(groups, states), c.view(groups, states)
    dt = softplus(a + layer.dt_bias)
    new, out = [], []
    for h in range(heads):
        group = h // (heads // groups)
        decay = torch.exp(-layer.A_log[h].exp() * dt[h])
        new.append(decay * s[h] + dt[h] * torch.outer(b[group], u[h]))
        out.append(c[group] @ new[-1] + layer.D[h] * u[h])
    y = torch.cat(out) * silu(z)
    y = rms(y.view(groups, -1)).flatten() * layer.norm.weight
    return layer.out_proj.weight @ y, torch.stack(new)


def run(token, layer, x, recurrent, conv):
    """y [B, T, D] and the states after it, of ``token(layer, x_t, s, windows)``."""
    names = [name for name, _ in layer.named_children() if "conv1d" in name]
    ys, recurrents, convs = [], [], []
    for b, sequence in enumerate(x):
        s = recurrent[b]
        windows = [Window(layer, name, c[b]) for name, c in zip(names, conv, strict=True)]
        out = []
        for x_t in sequence:
            y, s = token(layer, x_t, s, windows)
            out.append(y)
        ys.append(torch.stack(out))
        recurrents.append(s)
        convs.append([torch.stack(w.inputs) for w in windows])
    return torch.stack(ys), torch.stack(recurrents), tuple(torch.stack(c) for c in zip(*convs, strict=True))
