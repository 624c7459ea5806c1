"""A language model, an embedder and a classifier of a few lines, right or wrong on purpose."""

from __future__ import annotations

import zlib
from types import SimpleNamespace

import numpy as np

VOCAB = 97
BOUNDS = {
    "kl_mean_max": 1e-6,
    "top1_agreement_min": 0.999,
    "perplexity_ratio_max": 1.001,
    "cosine_mean_min": 0.99999,
    "cosine_min_min": 0.99999,
    "probability_error_mean_max": 1e-4,
}
SESSION = SimpleNamespace(providers=("CPUExecutionProvider",), threads=2, device_type="cpu")


def tokenize(text):
    return [1, *(byte % VOCAB for byte in text.encode())]


def render(messages):
    return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


class Model:
    """Logits of a position depend on all tokens up to it."""

    def __init__(self):
        generator = np.random.default_rng(0)
        self.table = generator.normal(size=(VOCAB, 16))
        self.head = generator.normal(size=(16, VOCAB))

    def __call__(self, history):
        decay = 0.9 ** np.arange(len(history))[::-1]
        return ((decay[:, None] * self.table[np.asarray(history)]).sum(0) @ self.head).astype(np.float32)


class FakeReference:
    name = "original"

    def __init__(self, template=True):
        self.model = Model()
        self.template = template

    def logits(self, ids):
        return np.stack([self.model(ids[: i + 1]) for i in range(len(ids))])

    def tokenize(self, text):
        return tokenize(text)

    def render(self, messages):
        return render(messages) if self.template else None


class FakeDecoder:
    """`fault` names what is broken: logits, nan, step, chunk, rewind or repeat."""

    session = SESSION

    def __init__(self, fault="", chunk_tokens=512):
        self.model, self.fault, self.chunk_tokens = Model(), fault, chunk_tokens
        self.history, self.calls, self.rewound = [], 0, False

    @property
    def length(self):
        return len(self.history)

    @property
    def context_length(self):
        return 256

    def _one(self, token):
        self.history.append(int(token))
        values = self.model(self.history)
        if self.fault == "logits":
            values = values[::-1].copy()
        if self.fault == "nan":
            values[3] = np.nan
        if self.fault == "rewind" and self.rewound:
            values = values + np.arange(VOCAB, dtype=np.float32)
        if self.fault == "repeat":
            self.calls += 1
            values = values + np.float32(1e-3) * np.float32(self.calls)
        return values

    def prefill(self, ids):
        return self.logits_all(ids)[-1]

    def step(self, token_id):
        values = self._one(token_id)
        return values * np.float32(0.5) if self.fault == "step" else values

    def logits_all(self, ids):
        rows = np.stack([self._one(token) for token in ids])
        return rows * np.float32(0.5) if self.fault == "chunk" and self.chunk_tokens < 512 else rows

    def reset(self):
        self.history, self.rewound = [], False

    def rewind(self, length):
        self.history, self.rewound = self.history[:length], True


class FakeEmbedder:
    """`fault` names what is broken: vectors, padding, batch, repeat, dimension or tokens."""

    name = "original"
    pad_token_id = 0
    session = SESSION

    def __init__(self, fault="", noise=0.0):
        self.fault, self.noise, self.calls = fault, noise, 0

    def encode_ids(self, text):
        return tokenize(text)[: 3 if self.fault == "tokens" else 128]

    def tokenize(self, text):
        return tokenize(text)[:128]

    def embed(self, texts, *, batch_size=16):
        items = [texts] if isinstance(texts, str) else list(texts)
        self.calls += 1
        size = 24 if self.fault == "dimension" else 32
        rows = [np.random.default_rng(zlib.crc32(text.encode())).normal(size=size) for text in items]
        values = np.stack(rows) + self.noise
        if self.fault == "vectors":
            values = -values
        if self.fault == "padding" and len({len(text) for text in items}) > 1:
            values += 1.0
        if self.fault == "batch" and len(items) > 2:
            values += 1.0
        if self.fault == "repeat":
            values += 1e-6 * self.calls
        return (values / np.linalg.norm(values, axis=-1, keepdims=True)).astype(np.float32)


class FakeClassifier:
    """`fault` names what is broken: logits, pixels, batch or repeat."""

    name = "original"
    session = SESSION

    def __init__(self, fault=""):
        self.fault, self.calls = fault, 0
        self.weights = np.random.default_rng(1).normal(size=(8 * 8 * 3, 10)) / 16

    def preprocess(self, image):
        from edge_convert.wrappers.image import load_image

        frame = np.asarray(load_image(image).resize((8, 8)), np.uint8).copy()
        if self.fault == "pixels":
            frame[0, 0, 0] ^= 1
        return frame

    def logits(self, frames):
        self.calls += 1
        values = (np.asarray(frames, np.float64).reshape(len(frames), -1) / 32 - 4) @ self.weights
        if self.fault == "logits":
            values = values[:, ::-1]
        if self.fault == "batch" and len(frames) > 1:
            values = values + np.arange(10)
        if self.fault == "repeat":
            values = values + 1e-3 * self.calls
        return values.astype(np.float32)
