"""ScaLLA inside other people's loops; each file needs the package that it is called after.

sklearn    ScaLLAClassifier, ScaLLARegressor: fit(X, y), predict_proba, predict(return_std=True)
lightning  ScaLLACallback: a fit at the end of training
"""
