"""Float models to graphs of OpenVINO and ONNX, and their int8 and int4 forms."""
