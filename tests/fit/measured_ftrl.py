"""What TensorFlow's Ftrl was measured to do."""

#: Losses of tf.estimator 2.15's LinearRegressor with its default optimizer, feats=[1.], label=[1.].
LOSSES = [
    1.0,
    0.36591389775276184,
    0.1597961038351059,
    0.07362604886293411,
    0.034663278609514236,
    0.016476696357131004,
    0.007866800762712955,
    0.0037638575304299593,
    0.0018026058096438646,
    0.000863725203089416,
]
