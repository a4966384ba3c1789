import phyai.processing as processing


def test_public_names():
    assert processing.__all__ == [
        "PRESETS",
        "DetectedPreset",
        "ModelInputs",
        "NormMode",
        "NormSystem",
        "Normalizer",
        "Observation",
        "PolicyProcessor",
        "PolicyShape",
        "Preset",
        "ProcessingError",
        "PromptForm",
        "PromptTokenizer",
        "ResizeFilter",
        "RobotTransform",
        "StateTextDims",
        "detect_preset",
        "get_preset",
        "load_stats",
        "observation_from_request",
    ]
    assert all(hasattr(processing, name) for name in processing.__all__)
