"""The settings of a run in nine frozen groups: types, ranges and meanings."""

from fedapp.settings._group import Auto, Group, OrAuto, unless_auto
from fedapp.settings.data import DataSettings
from fedapp.settings.evaluation import EvaluationSettings
from fedapp.settings.federation import FederationSettings
from fedapp.settings.model import ModelSettings
from fedapp.settings.privacy import PrivacySettings
from fedapp.settings.robustness import RobustnessSettings
from fedapp.settings.secure import SecureSettings
from fedapp.settings.storage import StorageSettings
from fedapp.settings.training import TrainingSettings

__all__ = [
    "Auto", "DataSettings", "EvaluationSettings", "FederationSettings", "Group", "ModelSettings", "OrAuto",
    "PrivacySettings", "RobustnessSettings", "SecureSettings", "StorageSettings", "TrainingSettings",
    "unless_auto",
]  # fmt: skip
