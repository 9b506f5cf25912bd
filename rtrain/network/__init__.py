"""What a pass computes: model and pooling, packed windows, their attention and dropout, device and number format."""
