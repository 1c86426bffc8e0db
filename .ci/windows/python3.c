// python3.dll, for modules of the stable ABI: panda3d's wheel lacks it. A definition file forwards its exports to python311.dll.
int _tls_index;

int start(void *library, unsigned long reason, void *reserved) { return 1; }
