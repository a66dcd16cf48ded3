"""Piper: text to speech in many languages, from ONNX files of users."""
