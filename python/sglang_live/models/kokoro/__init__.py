"""Kokoro: text to speech of 82 million parameters, from ONNX files of users."""
