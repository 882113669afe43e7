"""Post-hoc detectors on the trained network: `fit(train_loader)`, `score(x)`, larger = more outlying."""

from scalla.baselines.detectors.energy import Energy, ReAct
from scalla.baselines.detectors.fdbd import FDBD
from scalla.baselines.detectors.knn import KNN
from scalla.baselines.detectors.mahalanobis import GaussianMixture, Mahalanobis
from scalla.baselines.detectors.msp import MSP
from scalla.baselines.detectors.vim import ViM

__all__ = ["FDBD", "KNN", "MSP", "Energy", "GaussianMixture", "Mahalanobis", "ReAct", "ViM"]
