"""Recipes: what is read, what is overridden, and what is refused."""

import pytest

from phalanx.errors import ConfigError
from phalanx.train.recipe import load_recipe, recipe_from_table, recipe_table

RECIPE = """
name = "small"
[run]
folder = "runs/small"
plan = "zero1"
[text]
files = ["a.txt"]
[optimizer]
learning_rate = 1
[model.config]
hidden_size = 8
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(RECIPE)
    return path


def test_a_recipe_is_read_and_defaults_fill_the_rest(path):
    recipe = load_recipe(path)
    assert (recipe.run.plan, recipe.optimizer.learning_rate, recipe.model.config) == ("zero1", 1.0, {"hidden_size": 8})
    assert recipe.text_paths() == [path.parent / "a.txt"]
    assert recipe.steps.total == 100
    assert recipe_from_table(recipe_table(recipe)) == recipe


def test_overrides_win_and_bare_words_are_strings(path):
    recipe = load_recipe(
        path, ["run.plan=zero3+acc2", "steps.total=7", "model.config.num_hidden_layers=2", 'text.files=["b.txt", "c.txt"]']
    )
    assert (recipe.run.plan, recipe.steps.total, recipe.text.files) == ("zero3+acc2", 7, ("b.txt", "c.txt"))
    assert recipe.model.config == {"hidden_size": 8, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "steps.totl=3",
            "[steps] has an unknown key 'totl'. Allowed: total, log_every, evaluate_every, save_every, keep_last, keep_every. Try: total.",
        ),
        ("stepz.total=3", "Try: steps."),
        ("source=3", "unknown key 'source'"),
        ("run.plan=3", "run.plan is 3. Allowed: a string."),
        ("run.processes=true", "run.processes is True. Allowed: a whole number."),
        ("steps.total=2.5", "steps.total is 2.5. Allowed: a whole number."),
        ("batch.rows=0", "batch.rows is 0, not within 1 to"),
        ("optimizer.learning_rate=nan", "optimizer.learning_rate is nan"),
        ("text.files=a.txt", "text.files is 'a.txt'. Allowed: a list of strings."),
        ("text.files=[]", "text.files is empty"),
        ("name.x=3", "goes into 'name', which is a value"),
        ("steps=3", "[steps] is 3. Allowed: a table."),
        ("steps.total", "has no value"),
        ("steps.keep_last=-1", "steps.keep_last is -1, not within 0 to"),
        ("steps.keep_every=2", "steps.keep_every is set and steps.keep_last is 0, which keeps every checkpoint (try steps.keep_last=1)"),
    ],
)
def test_a_wrong_setting_is_refused_and_says_what_would_work(path, override, message):
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, [override])
    assert message in str(caught.value)


def test_all_values_out_of_range_are_named_at_once(path):
    with pytest.raises(ConfigError, match=r"batch\.rows is 0.*steps\.total is 0"):
        load_recipe(path, ["batch.rows=0", "steps.total=0"])


@pytest.mark.parametrize(
    ("content", "message"), [(b"name = ", "cannot be read"), (b"\xff\xfe", "cannot be read"), (b"name = 'a'", "lacks run, text")]
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path, content, message):
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_recipe(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        load_recipe(tmp_path / "absent.toml")
