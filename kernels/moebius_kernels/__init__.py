"""Operations of the model code, one file each, with a plain torch reference that runs on any device."""
