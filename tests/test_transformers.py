"""Text classification with transformers: a tokenizer's batches, padding, LoRA by peft, the graph for ONNX Runtime.

Everything is made here: a language of twenty words, in which one word of each text says its class.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from oracles import DenseLLA, dense_jacobian, probit_probs
from scalla import ScaLLA, context
from scalla.kernel_error import exact_kernel
from scalla.metrics import auroc

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import peft
    import tokenizers
    import transformers

# peft asks transformers by a name that is to change
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

CLASS_WORDS = ("fine", "poor", "odd")
WORDS = ("[PAD]", "[UNK]", "[CLS]", *CLASS_WORDS, *(f"w{i}" for i in range(14)))
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def texts(num: int, *, seed: int) -> list[tuple[str, int]]:
    """Three to seven words of w0 … w9, one of them a class word; w10 … w13 are never used."""
    rng = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(num):
        length, label = int(torch.randint(3, 8, (), generator=rng)), int(torch.randint(3, (), generator=rng))
        words = [f"w{int(i)}" for i in torch.randint(10, (length,), generator=rng)]
        words[int(torch.randint(length, (), generator=rng))] = CLASS_WORDS[label]
        found.append((" ".join(words), label))
    return found


def tokenizer() -> Any:
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    fast = tokenizers.Tokenizer(model)
    fast.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast.post_processor = tokenizers.processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 2)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="[PAD]", unk_token="[UNK]")


def batches(rows: list[tuple[str, int]], *, batch_size: int = 16) -> DataLoader[Any]:
    """As `transformers.Trainer` makes them: each batch a BatchEncoding, padded to a length of its own."""
    encode = tokenizer()
    examples = [{**encode(text), "label": label} for text, label in rows]
    return DataLoader(examples, batch_size=batch_size, collate_fn=transformers.DataCollatorWithPadding(encode))


def bert(**options: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.BertConfig(
            vocab_size=len(WORDS), max_position_embeddings=10, num_labels=3, pad_token_id=0, initializer_range=0.3,
            **SIZES, **options,
        )  # fmt: skip
        return transformers.BertForSequenceClassification(config)


def train(model: nn.Module, rows: list[tuple[str, int]], *, num_epochs: int, lr: float = 5e-3) -> nn.Module:
    model.train()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=lr)
    for _ in range(num_epochs):
        for batch in batches(rows, batch_size=32):
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
    return model.eval()


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    return train(bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0), texts(320, seed=1), num_epochs=6)


def test_a_classifier_of_texts(trained: nn.Module) -> None:
    train_rows, test_rows = texts(320, seed=1), texts(100, seed=2)
    before = {k: v.clone() for k, v in trained.state_dict().items()}
    la = ScaLLA(trained, "classification", num_features=20, seed=0)
    la.fit(batches(train_rows), context=context.TokenReplace(batches(train_rows)), bias=True, num_steps=60, lr=3e-3)
    assert la.n_data == 320
    probs, labels, scores = [], [], []
    for batch in batches(test_rows):
        probs.append(la(batch))
        labels.append(batch["labels"])
        scores.append(la.ood_score(batch))
    found, y = torch.cat(probs), torch.cat(labels)
    torch.testing.assert_close(found.sum(1), torch.ones(100))
    assert (found.argmax(1) == y).float().mean() > 0.98
    # Words that no training text has, and no class word.
    unseen = [(" ".join(f"w{10 + (i + j) % 4}" for j in range(5)), 0) for i in range(40)]
    outside = torch.cat([la.ood_score(batch) for batch in batches(unseen)])
    assert auroc(torch.cat(scores), outside) > 0.95
    for name, value in trained.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_padding_changes_nothing(trained: nn.Module) -> None:
    la = ScaLLA(trained, num_features=6).fit(batches(texts(48, seed=3)), num_steps=3)
    rows = sorted(texts(12, seed=4), key=lambda row: len(row[0]))
    alone = torch.cat([la.functional_variance(batch) for batch in batches(rows, batch_size=1)])
    together = torch.cat([la.functional_variance(batch) for batch in batches(rows, batch_size=12)])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-6)


CONFIG = {"vocab_size": len(WORDS), "num_labels": 3, "pad_token_id": 0}
DISTIL = {"dim": 8, "n_layers": 1, "n_heads": 2, "hidden_dim": 8, "max_position_embeddings": 12}
FAMILIES: dict[str, dict[str, Any]] = {
    "DistilBert": CONFIG | DISTIL,
    "Roberta": CONFIG | SIZES | {"max_position_embeddings": 12},
    "GPT2": CONFIG | {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 12},
    "Electra": CONFIG | SIZES | {"embedding_size": 8, "max_position_embeddings": 12},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("surrogate", ["mirror", "trunk"])
def test_other_families(family: str, surrogate: str) -> None:
    """Their exact kernel by Jacobian-vector products, and a posterior from the features there are."""
    config = getattr(transformers, f"{family}Config")(**FAMILIES[family])
    model = getattr(transformers, f"{family}ForSequenceClassification")(config).double().eval()
    rows = batches(texts(16, seed=5), batch_size=8)
    la = ScaLLA(model, num_features=5, surrogate=surrogate).fit(rows, num_steps=2)
    x = next(iter(batches(texts(3, seed=6))))
    inputs = {k: v for k, v in x.items() if k != "labels"}
    kernel = exact_kernel(la.feature_map.plain, la.feature_map.params, x)
    flat = dense_jacobian(model, inputs).flatten(0, 1)
    torch.testing.assert_close(kernel, flat @ flat.T, rtol=1e-6, atol=1e-8)
    with torch.no_grad():
        seen = [(la.features(b), model(**{k: v for k, v in b.items() if k != "labels"}).logits) for b in rows]
    dense = DenseLLA(*(torch.cat(parts) for parts in zip(*seen, strict=True)), torch.zeros(16), "classification")
    wanted = probit_probs(model(**inputs).logits.detach(), dense.variance(la.features(x)))
    torch.testing.assert_close(la(x), wanted, rtol=1e-6, atol=1e-8)


def lora(model: nn.Module) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"], lora_dropout=0.1)
        return peft.get_peft_model(model, config)


@pytest.mark.parametrize(
    ("parameters", "num_params"),
    # 2 × (16 · 2 + 2 · 16) weights of the adapters, 3 · 16 + 3 of the head
    [("trainable", 128 + 51), (["*lora_*"], 128), ("last_layer", 51), (lambda name, p: "query.lora_B" in name, 32)],
    ids=["trainable", "patterns", "last_layer", "function"],
)
def test_a_kernel_over_the_adapters_of_lora(parameters: Any, num_params: int) -> None:
    model = train(lora(bert()), texts(32, seed=1), num_epochs=2).double()
    rows = batches(texts(32, seed=1))
    la = ScaLLA(model, num_features=8, parameters=parameters).fit(rows, num_steps=2)
    assert la.n_params == num_params == sum(p.numel() for p in la.feature_map.params.values())
    x: dict[str, Tensor] = {k: v for k, v in next(iter(batches(texts(4, seed=6)))).items() if k != "labels"}
    flat = dense_jacobian(model, x, list(la.feature_map.params)).flatten(0, 1)
    kernel, features = flat @ flat.T, la.features(x).flatten(0, 1)
    error = (features @ features.T - kernel).norm() / kernel.norm()
    assert la.kernel_error(x).error == pytest.approx(float(error), rel=1e-6)


def test_files_of_an_adapted_model(tmp_path: Path) -> None:
    model = train(lora(bert()), texts(32, seed=1), num_epochs=2)
    la = ScaLLA(model, num_features=8).fit(batches(texts(32, seed=1)), num_steps=2)
    la.save(tmp_path / "la.safetensors")
    x = next(iter(batches(texts(4, seed=6))))
    assert torch.equal(ScaLLA.load(tmp_path / "la.safetensors", model)(x), la(x))


@pytest.mark.slow
def test_the_graph_takes_texts_of_any_length(trained: nn.Module, tmp_path: Path) -> None:
    la = ScaLLA(trained, num_features=6, surrogate="trunk").fit(batches(texts(32, seed=1)), num_steps=3)
    example = next(iter(batches(texts(4, seed=6))))
    free = {name: {1: "sequence"} for name in ("input_ids", "attention_mask", "token_type_ids") if name in example}
    exported = la.export(tmp_path / "text.onnx", example, dynamic_axes=free)
    session = onnxruntime.InferenceSession(str(exported.path), providers=["CPUExecutionProvider"])
    for batch in batches(texts(9, seed=7), batch_size=5):
        feed = {i.name: batch[i.name].numpy() for i in session.get_inputs()}
        found = dict(zip(exported.outputs, session.run(list(exported.outputs), feed), strict=True))
        torch.testing.assert_close(torch.from_numpy(found["probs"]), la(batch), rtol=1e-4, atol=1e-4)
        wanted = la.ood_score(batch).float()
        torch.testing.assert_close(torch.from_numpy(found["ood_score"]), wanted, rtol=1e-4, atol=1e-4)
