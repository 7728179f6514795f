"""Reading text, holding a part back, and the tokenizer."""

from phalanx.train.recipe import load_recipe
from phalanx.train.text import encode, hold_out, read_corpus, tokenizer_for, train_tokenizer

TEXT = "\n\n".join(f"Paragraph {number} says: the façade of number {number} is 😀." for number in range(40))


def test_the_held_out_part_is_the_end_and_nothing_is_lost_or_shared():
    training, validation = hold_out([TEXT, "one line"], 0.2)
    assert [begin + end for begin, end in zip(training, [*validation, ""])] == [TEXT, "one line"] or training[1] + validation[
        1
    ] == "one line"
    assert training[0] + validation[0] == TEXT
    assert validation[0].startswith("Paragraph ")
    assert 0.1 < len(validation[0]) / len(TEXT) <= 0.2


def test_the_corpus_of_a_recipe_lies_beside_it(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "a.toml").write_text("name = 'a'\nrun = {folder = 'unused'}\ntext = {files = ['a.txt'], held_out = 0.2}")
    corpus = read_corpus(load_recipe(tmp_path / "a.toml"))
    assert corpus.training[0] + corpus.validation[0] == TEXT
    assert corpus.validation_bytes == len(corpus.validation[0].encode()) > len(corpus.validation[0])


def test_nothing_is_held_out_when_nothing_is_asked():
    assert hold_out([TEXT], 0.0) == ([TEXT], [])


def test_the_tokenizer_returns_every_text_byte_for_byte():
    tokenizer = train_tokenizer([TEXT], 300)
    assert tokenizer.get_vocab_size() == 300
    for text in (TEXT, "中文, never seen\t\r\n  ", ""):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_end_tokens_stand_around_every_text():
    tokenizer = train_tokenizer([TEXT], 300)
    end = tokenizer.token_to_id("<|end|>")
    row = encode(tokenizer, ["ab", "c"]).tolist()
    assert [position for position, token in enumerate(row) if token == end] == [0, len(tokenizer.encode("ab").ids) + 1, len(row) - 1]


def test_the_tokenizer_is_kept_and_another_text_has_another(tmp_path):
    first = tokenizer_for([TEXT], 300, tmp_path)
    (path,) = tmp_path.iterdir()
    stamp = path.stat().st_mtime_ns
    assert tokenizer_for([TEXT], 300, tmp_path).to_str() == first.to_str()
    assert path.stat().st_mtime_ns == stamp
    tokenizer_for([TEXT + "!"], 300, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
