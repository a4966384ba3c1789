"""The studies run on a tiny model, and the page shows the stored results."""

import json

import pytest
import torch

pytest.importorskip("tokenizers")

import _report
import study_lora_merges
import study_real_weights
from _sentence_encoder import SentenceEncoder, find_model, load_encoder, tokenize
from _sentences import sentences

CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "layer_norm_eps": 1e-12,
    "vocab_size": 512,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
}
PARTS = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attention_output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "ffn_in": "intermediate.dense",
    "ffn_out": "output.dense",
    "ffn_norm": "output.LayerNorm",
    "words": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "types": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A random encoder with one outlier column in a weight, as checkpoint files."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(0)
    model = SentenceEncoder(CONFIG)
    with torch.no_grad():
        model.layers[0].ffn_out.weight[:, 7] *= 50
    stored = {}
    for name, value in model.state_dict().items():
        module, _, kind = name.rpartition(".")
        prefix = "encoder.layer.0." if module.startswith("layers.") else ""
        stored[f"{prefix}{PARTS[module.split('.')[-1]]}.{kind}"] = value
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    words = sorted({word for text in sentences() for word in text.replace(".", " .").split()})
    vocabulary = {word: index for index, word in enumerate(["[PAD]", "[UNK]", *words][:512])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_sentences_are_varied_and_repeatable():
    first = sentences()
    assert len(set(first)) == 200
    assert first == sentences()
    assert first != sentences(seed=1)
    lengths = [len(text.split()) for text in first]
    assert min(lengths) <= 4
    assert max(lengths) >= 15


def test_the_encoder_ignores_padding(checkpoint):
    model = load_encoder(checkpoint)
    texts = sentences(5)
    together = model(*tokenize(checkpoint, texts))
    alone = torch.cat([model(*tokenize(checkpoint, [text])) for text in texts])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(together.norm(dim=-1), torch.ones(5))


def test_a_missing_model_is_reported(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        find_model(tmp_path)


def test_study_of_real_weights(checkpoint, monkeypatch):
    monkeypatch.setattr(study_real_weights, "sentences", lambda: sentences(6))
    result = json.loads(json.dumps(study_real_weights.study(checkpoint)))
    assert list(result["embeddings"]) == list(study_real_weights.FORMATS)
    outlier = result["layers"]["layers.0.ffn_out"]
    plain = result["layers"]["layers.0.ffn_in"]
    assert outlier["weight_kurtosis"] > 50 > plain["weight_kurtosis"]
    gain = outlier["sqnr"]["ConvRot INT8 g256"]["weight"] - outlier["sqnr"]["INT8"]["weight"]
    assert gain > 6
    assert "ConvRot INT8 g256" not in plain["sqnr"]
    for kinds in result["embeddings"].values():
        assert 0.9 < kinds["both"]["min"] <= kinds["both"]["mean"] <= 1
    quantized = result["embeddings"]["ConvRot INT8 g64"]["both"]["mean"]
    assert result["operator_int8_g64"]["mean"] == pytest.approx(quantized, abs=1e-4)


def test_study_of_lora_merges(tmp_path):
    row = study_lora_merges.study_size("ConvRot INT8 g64", 0.1, 12)
    assert row["kept_nearest"] < 0.1
    assert abs(row["kept_mean"] - 1) < 5 * row["kept_standard_error"] + 0.01
    assert row["error_of_mean"][-1] < row["error_of_mean"][0] / 2.5
    stored = json.loads(study_lora_merges.RESULT.read_text())
    study_lora_merges.plot(stored, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


@pytest.mark.parametrize("study", [study_real_weights, study_lora_merges])
def test_the_page_shows_the_stored_result(study):
    page = study.PAGE.read_text(encoding="utf-8")
    assert study.render(page, json.loads(study.RESULT.read_text())) == page


def test_a_page_without_markers_is_refused():
    with pytest.raises(ValueError, match="no markers"):
        _report.replace_table("text", "speed", "| a |")
