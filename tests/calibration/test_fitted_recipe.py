"""Which recipe a calibration fits: the one chosen for the length, if laws have an effect under it."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig

from isentrope.calibration import calibrate as study
from isentrope.calibration.calibrate import calibrate
from isentrope.calibration.config import CalibrationConfig
from isentrope.experiments.checkpoints import SHIPPED_MODELS
from tests.fixtures.models import llama, tokens

SMALL = {"max_position_embeddings": 16}


def test_auto_is_the_default(monkeypatch):
    model, rows = llama(**SMALL), tokens(4, 64).tolist()
    actual = calibrate(model, rows, "4x", levels=("scalar",))
    assert actual.data["recipe"] == "rerope:window=8+retrieve:size=4"
    assert actual.recipe.retrieve is not None
    folder = str(SHIPPED_MODELS / "llama")
    monkeypatch.setattr(study, "fit_laws", lambda model, texts, config, *more, **options: config)
    config = calibrate(folder, tokens(2, 512).tolist(), "2x")
    assert config.recipe == "rerope:window=128+share" and config.length == 512


def test_auto_is_what_a_law_has_an_effect_on():
    """Beyond four times 4096 a query that chooses far keys sees fewer than in training: all laws would be idle."""
    known = LlamaConfig(max_position_embeddings=4096)
    with pytest.warns(UserWarning, match="no law has an effect; rerope:window=2048 is fitted instead"):
        config = CalibrationConfig.parse_for(known, "4x", "auto")
    assert config.recipe == "rerope:window=2048" and config.length == 16384
    assert CalibrationConfig.parse_for(known, "2x", "auto").recipe == "rerope:window=2048+share"
    for train_length, window in ((512, 256), (16, 8)):
        config = CalibrationConfig.parse_for(known, "2x", "auto", train_length=train_length)
        assert config.recipe == f"rerope:window={window}+share"
    unknown = LlamaConfig()
    del unknown.max_position_embeddings
    assert CalibrationConfig.parse_for(unknown, 512, "auto", train_length=256).recipe == "rerope:window=128+share"


@pytest.mark.parametrize(
    "recipe", ["rerope:window=8+retrieve:blocks=1,size=2,sinks=0,queries=1", "sink:sinks=4,size=12"]
)
def test_recipes_that_show_no_more_keys_than_in_training_are_refused(recipe):
    with pytest.raises(ValueError, match="so that no law has an effect; extend the model with it as it is"):
        calibrate(llama(**SMALL), tokens(4, 64).tolist(), 64, recipe)
