#ifndef FERRY_TOOLS_REPORT_SVG_HPP
#define FERRY_TOOLS_REPORT_SVG_HPP

/// Pictures as self-contained SVG text: no external scripts, fonts or files. Units are pixels, y grows downwards.

#include <string>
#include <string_view>

namespace ferry::tools {

struct Color {
  double red = 0.0;  ///< each 0 to 1
  double green = 0.0;
  double blue = 0.0;
};

/// "#rrggbb"
std::string to_hex(const Color& color);
/// `a` at 0, `b` at 1.
Color mix(const Color& a, const Color& b, double share);
/// Hue in degrees, saturation and lightness from 0 to 1.
Color from_hsl(double hue, double saturation, double lightness);
/// Escapes text for XML, between tags and in quotes. Bytes that XML forbids become '?'.
std::string xml_escape(std::string_view text);

struct Box {
  double x = 0.0;
  double y = 0.0;
  double width = 0.0;
  double height = 0.0;
};

struct Paint {
  std::string fill = "none";
  std::string stroke = "none";
  double stroke_width = 1.0;
  double radius = 0.0;       ///< of the corners
  std::string_view kind{};   ///< the element's class, for readers of the file
  std::string_view hover{};  ///< text that a viewer shows under the mouse
};

enum class Anchor { kStart, kMiddle, kEnd };

struct TextStyle {
  double size = 12.0;
  std::string fill = "#1f2933";
  Anchor anchor = Anchor::kStart;
  bool bold = false;
  double rotation = 0.0;  ///< degrees, clockwise, about the text's own point
};

class Svg {
 public:
  Svg(double width, double height, std::string_view title);
  void rect(const Box& box, const Paint& paint);
  /// `dashes` in SVG's syntax, empty for none.
  void line(double x1, double y1, double x2, double y2, std::string_view stroke, std::string_view dashes = {});
  /// `y` is the baseline.
  void text(double x, double y, std::string_view text, const TextStyle& style);
  /// Complete document.
  std::string finish() const { return body_ + "</svg>\n"; }

 private:
  std::string body_;
};

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_REPORT_SVG_HPP
