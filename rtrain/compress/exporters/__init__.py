"""Float models to graphs of OpenVINO and ONNX, and their int8 and int4 forms. `rtrain.core.engines.ENGINES` names
the exporter of each engine."""
